"""Edits and their predictions."""
