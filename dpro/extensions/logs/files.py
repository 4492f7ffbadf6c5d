"""Recognises logs of a job: text that no importer reads, and error files of torchrun.

Takes paths from a user; returns the files in order of their names, or None if one of them is something else.
"""

from __future__ import annotations

from pathlib import Path

from dpro.ingest.reading.files import Source

MAX_FILES = 20_000
ERROR_FILE = "error.json"  # written by torchrun for a process whose function has `@record`
_LOGS = (".log", ".out", ".err", ".txt", ".gz", ".zst")  # in folders
_MAX_CONTROL = 0.01  # of the bytes: text has few control characters besides tabs, returns and escapes
_OF_TEXT = bytes({7, 8, 9, 10, 12, 13, 27, *range(32, 256)})


def log_files(paths: list[Path]) -> list[Path] | None:
    """Return the logs among files and folders; None if a path is a run, has a trace, or is not text."""
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = []
            for file in path.rglob("*"):
                if file.suffix not in _LOGS and file.name != ERROR_FILE and file.is_file():
                    return None  # a run, or a folder with traces
                inside += [file] if file.is_file() else []
            files += sorted(inside)[:MAX_FILES]
        else:
            return None
    files = [path for path in files if path.stat().st_size]
    return files if files and all(map(_is_log, files)) else None


def _is_log(path: Path) -> bool:
    from dpro.ingest.formats import registry, why_passed_over

    try:
        head = Source(str(path), path).head()
    except (OSError, ValueError):
        return False
    if path.name == ERROR_FILE:
        return head.lstrip()[:10] == b'{"message"'
    if not head or (head.lstrip()[:2] in (b'{"', b'["', b"[{", b"{\n", b"[\n", b"{\r", b"[\r", b"{}", b"[]")):
        return False  # JSON
    control = len(head.translate(None, _OF_TEXT))
    if control > _MAX_CONTROL * len(head) or registry().find(head) is not None:
        return False
    return not why_passed_over(path, head).advice  # something else that an extension knows
