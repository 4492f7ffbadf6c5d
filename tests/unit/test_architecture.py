"""Every file and function that ARCHITECTURE.md names exists, and the page stays short."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
# In backquotes: a path with a folder in it, and perhaps a name that its module defines.
NAMED = re.compile(r"`((?:[\w.]+/)+[\w.]*|\w+\.(?:py|toml|md))(?::(\w+))?`")
MAX_LINES = 120


def defined_in(file: Path) -> set[str]:
    """Return the functions, classes and constants that a module defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED.findall(PAGE))))
def test_what_the_page_names_exists(path: str, name: str) -> None:
    assert (ROOT / path).exists(), path
    if name:
        assert name in defined_in(ROOT / path)


def test_the_page_names_files_by_their_whole_path() -> None:
    found = NAMED.findall(PAGE)
    assert len(found) > 60
    in_quotes = re.findall(r"`([^`\n]+)`", PAGE)
    looks_like_a_file = [
        text for text in in_quotes if re.search(r"\.(py|md|toml)\b", text) and " " not in text
    ]
    assert [text for text in looks_like_a_file if not NAMED.fullmatch(f"`{text}`")] == []


def test_each_of_the_five_questions_is_answered_with_a_function_of_one_or_two_files() -> None:
    _, _, behind = PAGE.partition("## Five questions")
    questions, _, _ = behind.partition("\n## ")
    answers = re.split(r"^\d\. ", questions, flags=re.MULTILINE)[1:]
    assert len(answers) == 5
    assert all(any(name for _, name in NAMED.findall(answer)) for answer in answers)
    assert all(len({path for path, name in NAMED.findall(answer) if name}) <= 2 for answer in answers)


def test_the_page_is_short() -> None:
    assert len(PAGE.splitlines()) <= MAX_LINES
