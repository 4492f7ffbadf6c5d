"""Edits: each a small frozen dataclass that turns one graph into another."""
