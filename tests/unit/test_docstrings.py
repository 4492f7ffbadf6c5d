"""Public functions of two and more parameters say what each of them is: `Args:`, with shapes and units."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import ROOT, modules

PACKAGES = ("collectors", "dashboards", "dpro", "replay")
# Functions that share one protocol, which is described once: folder -> their parameters, and where that is.
PROTOCOLS = {
    "collectors/inside/apply": (["report", "recorder", "arguments"], "collectors/inside/apply/__init__.py"),
}


def public_functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield the public functions of a module, and the public methods of its public classes."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for node in [*tree.body, *(each for owner in classes for each in owner.body)]:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the parameters to describe: what is passed and not used has a name that begins with `_`."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [each.arg for each in given if each.arg not in ("self", "cls") and not each.arg.startswith("_")]


def is_command(function: ast.FunctionDef) -> bool:
    """Return whether a function is a command of click, whose docstring is the help that users read."""
    decorators = (ast.unparse(each) for each in function.decorator_list)
    return any(each.startswith("click.command(") for each in decorators)


def is_undocumented(function: ast.FunctionDef) -> bool:
    """Return whether a function has two parameters or more, and no `Args:`."""
    return (
        len(parameters(function)) > 1
        and not is_command(function)
        and "Args:" not in (ast.get_docstring(function) or "")
    )


def follows_protocol(path: Path, function: ast.FunctionDef) -> bool:
    """Return whether a function's parameters are those of a protocol of its folder."""
    return any(
        str(path).startswith(folder) and parameters(function) == shared
        for folder, (shared, _) in PROTOCOLS.items()
    )


def test_public_functions_of_several_parameters_describe_them() -> None:
    found = [
        f"{path}:{function.lineno} {function.name}"
        for path in modules(*PACKAGES)
        for function in public_functions(ast.parse((ROOT / path).read_text(encoding="utf-8")))
        if is_undocumented(function) and not follows_protocol(path, function)
    ]
    assert not found, "\n".join(found)


def test_each_protocol_describes_its_parameters() -> None:
    for shared, described in PROTOCOLS.values():
        docstring = ast.get_docstring(ast.parse((ROOT / described).read_text(encoding="utf-8"))) or ""
        assert all(f"{name}: " in docstring for name in shared), described


def test_methods_count_without_self_and_private_functions_and_commands_do_not() -> None:
    source = "def one(a): ...\ndef two(a, b): ...\ndef _own(a, b): ...\nclass C:\n  def three(self, a): ..."
    source += "\n@click.command('run')\ndef run(a, b): ...\ndef unused(a, _b): ..."
    assert [each.name for each in public_functions(ast.parse(source)) if is_undocumented(each)] == ["two"]
