"""What is packaged is what is on disk, and importing it loads no more than it should."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dpro.collectors.inject._dpro_autoload import ALIAS

HEAVY = {"numpy", "polars", "pyarrow", "rich", "torch", "numba", "msgspec", "plotly", "dash"}


@pytest.fixture(scope="module")
def setuptools_table(repository: Path) -> dict[str, Any]:
    document = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    return document["tool"]["setuptools"]


def _loaded_by(arguments: list[str]) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `python ARGUMENTS`."""
    code = (
        "import atexit, json, runpy, sys\n"
        "before = set(sys.modules)\n"
        "loaded = lambda: sorted({name.partition('.')[0] for name in set(sys.modules) - before})\n"
        "atexit.register(lambda: print(json.dumps(loaded()), file=sys.stderr))\n"
        f"sys.argv = {['dpro', *arguments]!r}\n"
        + ("runpy.run_module('dpro')" if arguments else "import dpro")
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stderr.splitlines()[-1])) - {"runpy", "atexit", "__mp_main__"}


@pytest.fixture(scope="module")
def packaged(repository: Path) -> dict[str, Any]:
    """What setup.py gives to setuptools."""
    given: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(repository)
        patch.setattr("setuptools.setup", lambda **arguments: given.update(arguments))
        runpy.run_path("setup.py")
    return given


def test_every_package_on_disk_is_declared_and_nothing_else(repository, packaged):
    on_disk = set()
    for name, folder in packaged["package_dir"].items():
        for init in (repository / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(repository / folder).parts
            on_disk.add(".".join((name, *inside)))
    assert packaged["packages"] == sorted(on_disk)


def test_a_folder_of_modules_is_a_package(repository, packaged):
    folders = {
        path.parent for root in packaged["package_dir"].values() for path in (repository / root).rglob("*.py")
    }
    lacking = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert lacking == [str(repository / "collectors" / "inject")]


def test_a_link_inside_dpro_leads_to_each_top_level_folder(repository, packaged):
    links = {path.name: path.readlink() for path in (repository / "dpro").iterdir() if path.is_symlink()}
    folders = {folder for name, folder in packaged["package_dir"].items() if name != "dpro"}
    assert links == {folder: Path("..", folder) for folder in folders}


def test_every_sample_file_is_shipped(repository, setuptools_table):
    patterns = setuptools_table["package-data"]["dpro.sample_traces"]
    root = repository / "sample_traces"
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    data = [path for path in files if path.suffix != ".py"]
    shipped = {path for path in data for pattern in patterns if path.match(pattern.removeprefix("**/"))}
    assert sorted(set(data) - shipped) == []


def test_every_file_that_gets_the_recorder_into_jobs_is_shipped(repository, setuptools_table):
    patterns = setuptools_table["package-data"]["dpro.collectors"]
    files = [path for path in (repository / "collectors" / "inject").rglob("*") if path.is_file()]
    names = [path.relative_to(repository / "collectors") for path in files if path.suffix != ".pyc"]
    assert len(names) == 3
    assert [name for name in names if not any(name.match(pattern) for pattern in patterns)] == []


def test_every_file_that_pages_are_made_of_is_shipped(repository, setuptools_table):
    patterns = setuptools_table["package-data"]["dpro.dashboards"]
    root = repository / "dashboards"
    files = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    data = [path for path in files if path.suffix not in (".py", ".pyc")]
    assert len(data) >= 3
    assert [path for path in data if not any(path.match(pattern) for pattern in patterns)] == []


def test_pictures_of_the_documentation_are_small_and_all_are_shown(repository):
    pictures = {path.name: path for path in (repository / "docs" / "images").iterdir()}
    pages = [repository / "README.md", *(repository / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w.]+)\)", page.read_text("utf-8"))}
    assert shown == set(pictures)
    assert all(path.stat().st_size <= 150_000 for path in pictures.values())


def test_import_dpro_loads_the_standard_library_only():
    assert _loaded_by([]) <= {"dpro", *sys.stdlib_module_names}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(argument):
    loaded = _loaded_by([argument])
    assert "click" in loaded
    assert loaded & HEAVY == set()


def test_code_inside_the_job_imports_only_the_standard_library_torch_and_the_recorder(repository):
    probes = sorted(repository.glob("dpro/extensions/*/inside"))
    assert len(probes) >= 3
    allowed = {"torch", ALIAS, *sys.stdlib_module_names}
    wrong = [
        f"{path}: {name}"
        for folder in (repository / "collectors" / "inside", *probes)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in _modules_imported_by(node)
        if name.partition(".")[0] not in allowed
    ]
    assert wrong == []


def _modules_imported_by(node: ast.AST) -> list[str]:
    """Modules of an import; none of a relative one."""
    if isinstance(node, ast.ImportFrom):
        return [] if node.level else [str(node.module)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_ci_runs_targets_that_exist(repository):
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    (targets,) = re.findall(
        r"^exec make --keep-going (.*)$", script.read_text(encoding="utf-8"), re.MULTILINE
    )
    known = re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"lint", "typecheck", "imports", "test", "docs"} == set(targets.split()) <= set(known)
