"""Bytes and values of source files: within limits, and never an exception that is not one line."""
