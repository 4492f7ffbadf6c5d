"""Every sentence that dpro can print, with its place in the code, for `make sentences`.

In: the product's modules. Out: one line per sentence, grouped by module: help of commands, findings, advice,
notes, refusals and errors, with `{…}` where a value is filled in. What programs alone read (names of columns,
patterns, SQL, code that runs elsewhere) is left out as far as its form shows it.

    make sentences && grep -n "slower than its peers" build/sentences.md
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.sources import ROOT, modules

PACKAGES = ("dpro", "replay", "collectors", "dashboards")
MIN_WORDS = 2
_WORD = re.compile(r"[A-Za-z][a-z]+")
# SQL, regular expressions, CSS, code, shell.
_NO_SENTENCE = re.compile(
    r"^\s*(SELECT|INSERT|DELETE|CREATE|BEGIN|PRAGMA|WITH |FROM |import |<|\.|#|\(\?)"
    r"|\\[dwsb(]|\);|=>|\{\{|px;"
)


def sentences_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each sentence of a module, in order."""
    tree = ast.parse(source)
    within = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            within |= {id(part) for part in ast.walk(node) if part is not node}
    found = {
        (node.lineno, text)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in within
        for text in (" ".join(_text_of(node).split()),)
        if _is_sentence(text)
    }
    yield from sorted(found | set(_help_of_commands(tree)))


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    return "".join(map(_text_of, node.values)) if isinstance(node, ast.JoinedStr) else ""


def _is_sentence(text: str) -> bool:
    plain = re.sub(r"\{[^}]*\}", "", text)
    return len(_WORD.findall(plain)) >= MIN_WORDS and " " in plain.strip() and not _NO_SENTENCE.search(text)


def _docstrings(tree: ast.Module) -> set[int]:
    """The nodes of all docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, kinds) and node.body and isinstance(node.body[0], ast.Expr)
    }


def _help_of_commands(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The docstrings of commands, which `--help` prints."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any(
            re.search(r"command\(|group\(", ast.unparse(decorator)) for decorator in node.decorator_list
        ):
            for line in (ast.get_docstring(node) or "").split("\n\n"):
                yield node.lineno, " ".join(line.split())


def page() -> str:
    """All sentences, by module."""
    lines = ["# Every sentence that dpro can print", ""]
    for path in modules(*PACKAGES):
        rows = list(sentences_of((ROOT / path).read_text(encoding="utf-8")))
        if rows:
            lines += [f"## {path}", "", *(f"- {line}: {text}" for line, text in rows), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    to = Path(sys.argv[1])
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(page(), encoding="utf-8")
