"""What-if edits: small frozen dataclasses, each of which turns one graph into another."""
