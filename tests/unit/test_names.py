"""Names stand for one thing and say what they hold, and texts name what exists.

No two modules define public classes of the same name; no variable, argument, field or function has a name
that fits anything; a dotted name of dpro in backquotes can be imported.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.sources import ROOT, modules

PACKAGES = ("collectors", "dashboards", "dpro", "replay", "sample_traces")


def test_each_public_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules(*PACKAGES):
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    assert len(places) > 300
    assert not {name: lines for name, lines in places.items() if len(lines) > 1}


FIT_ANYTHING = {"each", "found", "known", "own"}
BOUND_BY = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.FunctionDef: "name"}


def test_names_say_what_they_hold() -> None:
    bindings = {
        (f"{path}:{node.lineno}", getattr(node, BOUND_BY[type(node)]))
        for path in modules(*PACKAGES)
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if type(node) in BOUND_BY and isinstance(getattr(node, "ctx", ast.Store()), ast.Store)
    }
    assert len(bindings) > 10_000
    assert not {(place, name) for place, name in bindings if name in FIT_ANYTHING}


DOTTED = re.compile(r"`(dpro(?:\.\w+){2,})`")
GROUPS = {"dpro.extensions"}  # of entry points


def _top_level_names(tree: ast.Module) -> set[str]:
    """Return what a module defines or imports, and `Class.member`."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
            names |= {f"{node.name}.{target.id}" for target in fields if isinstance(target, ast.Name)}
        elif not isinstance(node, ast.FunctionDef):
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            names |= {(part.asname or part.name) for part in ast.walk(node) if isinstance(part, ast.alias)}
    return names


def test_dotted_names_in_docstrings_and_comments_exist() -> None:
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in modules(*PACKAGES)}
    exist: set[str] = set()
    for path, text in texts.items():
        parts = path.with_suffix("").parts
        name = ".".join(
            part for part in (parts if parts[0] == "dpro" else ("dpro", *parts)) if part != "__init__"
        )
        exist |= {name, *(f"{name}.{inner}" for inner in _top_level_names(ast.parse(text)))}
    named = {(str(path), name) for path, text in texts.items() for name in DOTTED.findall(text)}
    assert len(named) > 20
    assert not {(path, name) for path, name in named if name not in exist | GROUPS}
