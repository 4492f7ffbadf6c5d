"""What programs are given: documents, their encoding, their schemas, and the page that lists them."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec
import numpy as np
import pytest

from dpro.analysis.answers.diagnosis import DiagnosisDocument
from dpro.cli import cli
from dpro.documents import Document, DocumentPart, encode, plain, schema_of
from dpro.extensions.trial.documents import LedgerDocument
from dpro.extensions.trial.ledger import LedgerEntry, Ratio, append
from tests.commands import dpro
from tests.json_page import COMMANDS, page
from tests.reference.hanging_dumps import dumps_of_a_stuck_host

pytestmark = pytest.mark.usefixtures("searched_once")

ROOT = Path(__file__).parents[2]
SAMPLES = ("healthy", "slow_rank", "slow_input")
WITH_A_JOB = ("attach", "watch")
READING = [
    command
    for command in COMMANDS
    if command.split()[2:3] == ["RUN"]
    and command.split()[1] not in WITH_A_JOB
    and not {"FILE", "URL", "COPY"} & set(command.split())
]


class Inner(DocumentPart, frozen=True):
    """A part.

    Attributes:
        class: a word of Python.
        low, high: two numbers,
            in ms.
    """

    class_: str = msgspec.field(name="class")
    low: float
    high: float


class Outer(Document, frozen=True, kw_only=True):
    """A document.

    Attributes:
        parts: what it is made of.
    """

    parts: list[Inner]


class Further(Inner, frozen=True):
    """A part with more keys.

    Attributes:
        further: one more.
    """

    further: int


class Around(Document, frozen=True, kw_only=True):
    """A document of such a part.

    Attributes:
        part: the part.
    """

    part: Further


def test_version_comes_first_and_numbers_of_numpy_are_plain():
    document = Outer(parts=[Inner("x", np.float64(1.5), np.int64(2))])
    assert encode(document) == ('{"schema_version": 2, "parts": [{"class": "x", "low": 1.5, "high": 2}]}')
    assert msgspec.convert(plain(document), Outer) == document


@pytest.mark.parametrize("number", [float("nan"), float("inf"), np.float64("nan")])
def test_what_json_cannot_express_is_an_error_rather_than_a_damaged_document(number):
    with pytest.raises(ValueError, match="JSON"):
        encode(Outer(parts=[Inner("x", 0.0, number)]))


def test_schemas_say_what_each_key_means():
    schema = schema_of(Outer)
    assert schema["required"] == ["parts"]
    assert schema["properties"]["parts"]["description"] == "what it is made of."
    assert schema["properties"]["schema_version"]["description"].startswith("version of all documents")
    inner = schema["$defs"]["Inner"]
    assert inner["description"] == "A part."
    meanings = {name: each["description"] for name, each in inner["properties"].items()}
    assert meanings == {
        "class": "a word of Python.", "low": "two numbers, in ms.", "high": "two numbers, in ms."
    }  # fmt: skip


def test_keys_that_a_part_inherits_mean_the_same():
    keys = schema_of(Around)["$defs"]["Further"]["properties"]
    assert [keys[name]["description"] for name in ("class", "low", "further")] == [
        "a word of Python.", "two numbers, in ms.", "one more."
    ]  # fmt: skip


def test_every_key_of_every_command_has_a_meaning():
    for kind in COMMANDS.values():
        schema = schema_of(kind)
        for part in (schema, *schema.get("$defs", {}).values()):
            assert part["description"], part["title"]
            for name, declared in part["properties"].items():
                assert declared.get("description"), f"{part['title']}.{name}"


def test_every_command_with_json_and_its_options_are_on_the_page():
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    options = {
        name: {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        for name, command in found.items()
    }
    assert {name for name, given in options.items() if "--json" in given} == {
        command.split()[1] for command in COMMANDS
    }
    for command in COMMANDS:
        _, name, *words = command.partition(" -- ")[0].split()
        assert {word for word in words if word.startswith("-")} <= options[name], command


def test_the_page_of_the_documents_is_generated_from_them():
    assert (ROOT / "docs" / "json.md").read_text() == page(), "run `make schema`"


@pytest.mark.few(8)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("command", READING)
def test_what_a_command_prints_is_what_its_schema_says(command, sample):
    words = (
        command.replace("dpro ", "", 1)
        .replace("RUN", str(ROOT / "sample_traces" / sample))
        .replace("SQL", "VALUES(1)")
        .split()
    )
    done = dpro(*words, "--json")
    if "--pareto" in words:  # the samples have no allocations
        assert "--memory" in done.stderr
        return
    if "serving" in words:  # they are of training; `tests/unit/extensions/serving` has the answer on a server
        assert "no requests and no iterations" in done.stderr
        return
    printed = json.loads(done.stdout)
    document = msgspec.convert(printed, COMMANDS[command])
    assert json.loads(encode(document)) == printed


def test_the_diagnosis_of_dumps_is_what_its_schema_says(tmp_path):
    dumps_of_a_stuck_host(tmp_path)
    printed = json.loads(dpro("diagnose", tmp_path, "--json").stdout)
    document = msgspec.convert(printed, DiagnosisDocument)
    assert document.findings[0].class_ == "hang.host"
    assert document.step_time is msgspec.UNSET
    assert plain(document) == printed


def test_the_ledger_is_what_its_schema_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    ratio = Ratio(0.9, 0.8, 1.0)
    for predicted in (ratio, None):
        append(
            LedgerEntry(
                "bucket", ["bucket:mb=1"], predicted, ratio, None, 10.0, 1, 50, 2, "2026-01-01T00:00:00Z"
            )
        )
    printed = json.loads(dpro("ledger", "--json").stdout)
    document = msgspec.convert(printed, LedgerDocument)
    assert [(kind.tries, kind.predicted) for kind in document.kinds] == [(2, 1)]
    assert plain(document) == printed
    assert "off by +0.0%" in dpro("ledger").stdout
