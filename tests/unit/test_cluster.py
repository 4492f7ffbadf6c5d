"""What is put into clusters: manifests are held to Kubernetes' schemas, images to the page on installing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from dpro.cli import cli
from tests.commands import dpro

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "dpro" / "extensions" / "watch" / "recipes"


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    """Those of the recipe by kind and name."""
    yaml = pytest.importorskip("yaml")
    documents = list(yaml.safe_load_all(dpro("recipe", "kubernetes-job").stdout))
    return {(each["kind"], each["metadata"]["name"]): each for each in documents}


@pytest.mark.parametrize("version", ["1.28", "1.31", "1.34"])
def test_manifests_are_what_kubernetes_takes(manifests, version):
    validate = pytest.importorskip("kubernetes_validate")
    assert len(manifests) == 6
    for manifest in manifests.values():
        validate.validate(manifest, version, strict=True)


def test_a_manifest_with_a_key_that_there_is_not_is_refused(manifests):
    validate = pytest.importorskip("kubernetes_validate")
    job = json.loads(json.dumps(manifests["Job", "train"]))
    job["spec"]["parallel"] = 3
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.31", strict=True)


def test_the_account_of_the_watcher_may_do_what_its_commands_do(manifests):
    rules = manifests["ClusterRole", "dpro-watch"]["rules"]
    allowed = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    [watch] = manifests["Job", "train-watch"]["spec"]["template"]["spec"]["containers"]
    script = (RECIPES / "kubernetes.sh").read_text() + watch["args"][0]
    needed = {
        "kubectl get pod": ("pods", "get"), "kubectl get pods": ("pods", "list"),
        "kubectl cordon": ("nodes", "patch"), "kubectl delete pod": ("pods", "deletecollection"),
        "kubectl patch": ("jobs", "patch"),
    }  # fmt: skip
    used = set(re.findall(r"kubectl (?:get|delete) \w+|kubectl \w+", script))
    assert used == needed.keys()
    assert set(needed.values()) <= allowed


def test_containers_run_commands_that_there_are(manifests):
    [train] = manifests["Job", "train"]["spec"]["template"]["spec"]["containers"]
    [watch] = manifests["Job", "train-watch"]["spec"]["template"]["spec"]["containers"]
    for words in (train["command"], shlex.split(watch["args"][0].partition("exec ")[2])):
        assert words[0] == "dpro"
        command = cli.get_command(click.Context(cli), words[1])
        known = {name for option in command.params for name in option.opts}
        assert {word for word in words[2:] if word.startswith("-") and word != "--"} <= known


def test_the_image_is_made_by_the_commands_of_the_page_on_installing():
    page = (ROOT / "docs" / "install.md").read_text()
    said = {line.partition("#")[0].strip() for line in page.splitlines() if line.startswith("    ")}
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if line and line[0] != "#"]
    by_kind = {kind: [line.split(" ", 1)[1] for line in lines if line.startswith(kind)]
               for kind in ("ARG", "FROM", "COPY", "WORKDIR", "RUN", "ENTRYPOINT")}  # fmt: skip
    assert sum(map(len, by_kind.values())) == len(lines)
    assert by_kind["RUN"]
    assert set(by_kind["RUN"]) <= said
    assert json.loads(by_kind["ENTRYPOINT"][0]) == ["dpro"]
    assert re.fullmatch(r"BASE=docker\.io/library/python:3\.1[1-4]-slim", by_kind["ARG"][0])


def test_nothing_that_is_made_here_goes_into_the_image():
    ignored = (ROOT / ".containerignore").read_text().split()
    assert set((ROOT / ".gitignore").read_text().split()) | {".git"} == set(ignored)


def test_recipes_in_shell_are_shell():
    for script in RECIPES.glob("*.sh"):
        assert subprocess.run(["sh", "-n", script]).returncode == 0
