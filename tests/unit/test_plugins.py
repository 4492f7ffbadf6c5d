"""Extensions: which are found, what they bring, and that the page about them says so."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from dpro import plugins
from dpro.errors import DproError
from dpro.plugins import Command, Extension, installed, load
from tests.sources import ROOT, modules

PAGE = (ROOT / "docs" / "extensions.md").read_text(encoding="utf-8")


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Makes a distribution with an extension that looks installed; afterwards it is forgotten."""
    number = 0

    def make(name: str, declared: str, folder: str = "site") -> None:
        nonlocal number
        number += 1
        info = tmp_path / folder / f"{name}-{number}.dist-info"
        info.mkdir(parents=True)
        module = f"dpro_{name}_{number}"
        (tmp_path / folder / f"{module}.py").write_text(
            f"from dpro.plugins import *\nEXTENSION = {declared}\n"
        )
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
        (info / "entry_points.txt").write_text(
            f"[dpro.extensions]\n{name} = {module}:EXTENSION\n[other]\nbeta = b:B\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        installed.cache_clear()

    yield make
    monkeypatch.undo()
    installed.cache_clear()


def test_extensions_are_found_by_name_and_a_distribution_counts_once(install):
    before = list(installed().extensions)
    install("zeta", "Extension(views={'z': 'z:Z'})", "first")
    install("alpha", "Extension()")
    install("zeta", "Extension(views={'z': 'other:Z'})", "second")
    assert sorted([*before, "alpha", "zeta"]) == list(installed().extensions)
    assert plugins.places("views")["z"] == "other:Z"  # the first on the path
    assert installed().complaints == ()


@pytest.mark.parametrize(
    ("declared", "what"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("'text'", "it is not a dpro.plugins.Extension")],
)
def test_an_extension_that_is_broken_is_one_line(install, declared, what):
    install("broken", declared)
    (line,) = installed().complaints
    assert line == f"extension broken (dpro_broken_1:EXTENSION) cannot be used: {what}"
    assert "broken" not in installed().extensions


def test_an_extension_whose_needs_are_missing_is_not_offered_nor_what_needs_it(install):
    install("first", "Extension(needs=('nowhere',), commands={'one': Command('a:b', 'help', 'Answer')})")
    install("second", "Extension(needs=('first',))")
    install("third", "Extension(needs=('watch',))")
    assert {"first", "second", "third"} & installed().extensions.keys() == {"third"}
    assert "one" not in plugins.commands()


def test_values_pass_through_all_extensions_in_the_order_of_their_names(install, monkeypatch):
    functions = {"a:add": lambda x, y: x + y, "b:double": lambda x, y: 2 * x}
    monkeypatch.setattr(plugins, "load", lambda place: functions.get(place) or load(place))
    install("second", "Extension(hooks={'summed': 'b:double'})")
    install("first", "Extension(hooks={'summed': 'a:add'})")
    assert plugins.extended("summed", 1, 10) == 22
    assert plugins.extended("never", 1, 10) == 1


def test_a_hook_or_option_that_cannot_be_loaded_is_one_line_that_names_its_extension(install):
    declared = "Extension(hooks={'summed': 'nowhere_at_all:add'}, options={'record': 'nowhere_at_all:O'})"
    install("unloadable", declared)
    for ask in (lambda: list(plugins.hooks_of("summed")), lambda: plugins.options_of("record")):
        with pytest.raises(DproError) as caught:
            ask()
        why = "ModuleNotFoundError: No module named 'nowhere_at_all'"
        assert str(caught.value).startswith("extension unloadable (nowhere_at_all:")
        assert str(caught.value).endswith(f"cannot be loaded: {why}")


def test_extensions_of_a_checkout_that_is_not_installed_are_those_of_its_project_file(monkeypatch):
    monkeypatch.setattr("sys.path", [str(ROOT)])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"]["dpro.extensions"]
    assert dict(plugins.entries()) == declared


def test_all_that_dpros_own_extensions_declare_exists():
    """But the views: the dashboard's tests load them."""
    for name, extension in installed().extensions.items():
        for command in extension.commands.values():
            assert isinstance(command, Command)
            assert load(command.place).name in (*extension.commands, None)
        for kind in ("options", "detectors", "importers", "hooks"):
            for place in getattr(extension, kind).values():
                assert load(place) is not None, (name, place)


def test_extensions_declare_without_importing_what_they_declare():
    """Their `__init__` imports `dpro.plugins` alone, the dashboards' the standard library too."""
    for name in installed().extensions:
        folder = "dashboards" if name == "dashboards" else f"dpro/extensions/{name}"
        text = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
        imported = set(re.findall(r"(?m)^(?:from|import) (\S+)", text))
        assert imported <= {"dpro.plugins", "__future__", "logging"}


def test_the_page_about_extensions_lists_all_fields_occasions_and_extensions():
    listed = set(re.findall(r"(?m)^- `(\w+(?: NAME)?)`: ", PAGE))
    kinds = {field.name for field in fields(Extension)}
    calls = re.compile(r'(?:hooks_of|extended)\(\s*f?"(\w+)')
    sources = [ROOT / path for path in modules("dpro", "dashboards", "collectors", "replay")]
    occasions = {name for path in sources for name in calls.findall(path.read_text(encoding="utf-8"))}
    occasions = {"view NAME" if name == "view" else name for name in occasions}
    assert listed == kinds | occasions | installed().extensions.keys()
    for name, extension in installed().extensions.items():
        row = [line for line in PAGE.splitlines() if line.startswith(f"- `{name}`:")][-1]
        assert set(re.findall(r"`(\w+)`", row.partition("; needs ")[2])) == set(extension.needs)


def test_every_folder_of_an_extension_is_declared():
    folders = {path.parent.name for path in Path(ROOT, "dpro", "extensions").glob("*/__init__.py")}
    assert folders | {"dashboards"} == installed().extensions.keys()
