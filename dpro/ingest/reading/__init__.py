"""Bytes and values of source files, within limits; every error is a single line."""
