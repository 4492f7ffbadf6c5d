"""One idea per module: no module above 450 lines, no function above 60, no folder above 11 or 13 modules."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.sources import ROOT, modules

FOLDERS = ("benchmarks", "collectors", "dashboards", "dpro", "replay", "sample_traces")
MAX_MODULE = 450
MAX_FUNCTION = 60
MAX_MODULES = 13  # in a folder, besides its `__init__.py`
MAX_MODULES_OF_MODELS = 11  # in a folder of the packages whose ideas are the most: graph, what-if, detectors
PACKAGES_OF_MODELS = ("replay", "dpro/detect")
# What is still too large. An entry leaves this list when it is small enough, and none may join it.
PENDING = {
    "dpro",
}


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


def _beyond(sizes: dict[str, int], most: int) -> dict[str, int]:
    """Return what is too large and not pending."""
    return {name: size for name, size in sizes.items() if size > most and name not in PENDING}


def test_no_module_is_longer_than_450_lines() -> None:
    lines = {
        str(path): len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in modules(*FOLDERS)
    }
    assert not _beyond(lines, MAX_MODULE)


def test_no_function_is_longer_than_60_lines() -> None:
    assert not _beyond(
        {name: size for path in modules(*FOLDERS) for name, size in _functions(path)}, MAX_FUNCTION
    )


def test_no_folder_has_more_than_13_modules_and_none_of_replay_and_detect_more_than_11() -> None:
    count = Counter(str(path.parent) for path in modules(*FOLDERS) if path.name != "__init__.py")
    assert not _beyond(dict(count), MAX_MODULES)
    of_models = {folder: size for folder, size in count.items() if folder.startswith(PACKAGES_OF_MODELS)}
    assert of_models
    assert not _beyond(of_models, MAX_MODULES_OF_MODELS)
