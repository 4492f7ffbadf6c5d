"""No function is longer than 60 lines. Modules and folders have no limit: one idea each, however long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import ROOT, modules

FOLDERS = ("benchmarks", "collectors", "dashboards", "dpro", "replay", "sample_traces")
MAX_FUNCTION = 60


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and number of lines of each function of a module, nested ones too.

    The docstring of a command is its help, and does not count.
    """
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_command = any("command" in ast.unparse(each) for each in node.decorator_list)
            begin = (
                (first.end_lineno or first.lineno) if is_command and ast.get_docstring(node) else node.lineno
            )
            yield f"{path}:{node.name}", (node.end_lineno or begin) - begin + 1


def test_no_function_is_longer_than_60_lines() -> None:
    sizes = {name: size for path in modules(*FOLDERS) for name, size in _functions(path)}
    assert not {name: size for name, size in sizes.items() if size > MAX_FUNCTION}
