"""What hosts and contributors read about the project agrees with the project itself."""

from __future__ import annotations

import re
import tomllib
from itertools import chain

import pytest

from tests.sources import ROOT
from tests.support import CELLS

yaml = pytest.importorskip("yaml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def _read(name: str) -> object:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def _pythons() -> list[str]:
    return [cell.name for cell in CELLS if cell.row == "Python"]


def test_hosted_ci_runs_what_any_machine_runs_on_all_supported_pythons():
    job = _read(".github/workflows/ci.yml")["jobs"]["check"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["strategy"]["matrix"]["python"] == _pythons()
    declared = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: 3." in line]
    assert declared == _pythons()
    assert PROJECT["requires-python"] == f">={_pythons()[0]}"


def test_workflows_run_targets_that_exist():
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values():
            for command in (step["run"] for step in job["steps"] if "run" in step):
                assert command.removeprefix("make ") in targets or (ROOT / command).is_file(), command


def test_hooks_before_a_commit_are_the_tools_of_lint_and_typecheck():
    (repository,) = _read(".pre-commit-config.yaml")["repos"]
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in repository["hooks"]:
        command = hook["entry"].replace(".venv/bin/", "$(BIN)/").removesuffix(" --fix")
        assert f"\t{command}" in made or command == "make imports"


def test_the_development_environment_is_pinned_whole():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    named = [*PROJECT["dependencies"], *chain.from_iterable(PROJECT["optional-dependencies"].values())]
    needed = {re.match(r"[\w-]+", text)[0].lower() for text in named} - {"dpro-toolkit"}
    assert needed - pins.keys() == set()
    assert len(pins) > 2 * len(needed)
    assert all(re.fullmatch(r"[\w.]+", version) for version in pins.values())


def test_a_citation_is_of_the_latest_release():
    citation = _read("CITATION.cff")
    dated = re.search(r"(?m)^## \[([\d.]+)\] - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    assert (citation["version"], str(citation["date-released"])) == dated.groups()
    assert citation["license"] == PROJECT["license"]


def test_the_project_says_where_it_is():
    assert {"Source", "Documentation", "Changelog", "Issues"} <= PROJECT["urls"].keys()
    assert len({url.split("/dpro")[0] for url in PROJECT["urls"].values()}) == 1
