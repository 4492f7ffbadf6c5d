"""Public functions of two and more parameters say what each of them is: `Args:`, with shapes and units."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.sources import ROOT, modules

PACKAGES = ("collectors", "dashboards", "dpro", "replay")
# Files that are still to be documented. An entry leaves this list when it is done, and none may join it.
PENDING = (
    "collectors/",
    "dashboards/",
    "dpro/analysis/",
    "dpro/cli/",
    "dpro/detect/",
    "dpro/ingest/",
    "dpro/store.py",
    "dpro/watch/",
    "dpro/words.py",
)


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the public functions of a module, and the public methods of its public classes."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for node in [*tree.body, *(each for owner in classes for each in owner.body)]:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def is_undocumented(function: ast.FunctionDef) -> bool:
    """Return whether a function has two parameters or more, and no `Args:`."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    own = [each for each in given if each.arg not in ("self", "cls")]
    return len(own) > 1 and "Args:" not in (ast.get_docstring(function) or "")


def test_public_functions_of_several_parameters_describe_them() -> None:
    found = [
        f"{path}:{function.lineno} {function.name}"
        for path in modules(*PACKAGES)
        if not str(path).startswith(PENDING)
        for function in public_functions(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if is_undocumented(function)
    ]
    assert not found, "\n".join(found)


def test_methods_count_without_self_and_private_functions_do_not() -> None:
    source = "def one(a): ...\ndef two(a, b): ...\ndef _own(a, b): ...\nclass C:\n  def three(self, a): ..."
    assert [each.name for each in public_functions(ast.parse(source)) if is_undocumented(each)] == ["two"]
