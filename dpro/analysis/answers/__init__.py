"""Answers of the commands that read a run, as typed documents for `--json`, notebooks and `dpro mcp`.

Each module computes one answer from an `Analysis` or a run, and declares its document. None prints.
"""
