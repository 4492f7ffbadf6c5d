"""Edits of kernels."""
