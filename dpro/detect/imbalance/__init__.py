"""Uneven work."""
