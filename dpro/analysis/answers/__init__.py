"""What the commands that read a run answer, as typed documents: for `--json`, notebooks and `dpro mcp`.

Each module computes one answer from an `Analysis` or a run, prints nothing, and declares its document:
"""
