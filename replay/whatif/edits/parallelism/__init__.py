"""Edits of how a model is cut over ranks."""
