"""Edits declare themselves once: help, parser and documentation say the same of each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from dpro.cli.whatif import whatif
from dpro.errors import UsageError
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.grammar import keys_of
from dpro.replay.whatif.registry import (
    EDITS,
    FAMILIES,
    all_kinds,
    apply_change,
    changes_by_command,
    generate,
    help_rows,
    kind_named,
    list_text,
    parse_edit,
)

PAGE = Path(__file__).parents[4] / "docs" / "reference" / "edits.md"
edits = pytest.mark.parametrize("edit", all_kinds(), ids=EDITS)


def test_no_two_edits_share_a_name():
    assert len(EDITS) == sum(len(family) for family in FAMILIES.values())


@pytest.mark.parametrize("name", EDITS)
def test_each_name_leads_to_the_edit_that_is_called_so(name):
    assert kind_named(name).name == name


def test_the_refusal_of_a_layout_names_the_command_that_ranks_them():
    with pytest.raises(UsageError, match="dpro plan RUN"):
        parse_edit("layout:dp=4,tp=2")


def test_an_edit_is_imported_when_it_is_asked_for():
    code = "import sys; from dpro.replay.whatif.registry import parse_edit; parse_edit('network:bandwidth=2')"
    loaded = subprocess.run(
        [sys.executable, "-c", f"{code}; print(*sys.modules)"], capture_output=True, text=True
    )
    edits = {name for name in loaded.stdout.split() if name.startswith("dpro.replay.whatif.edits.")}
    assert edits == {"dpro.replay.whatif.edits.communication"}


@edits
def test_the_example_of_an_edit_makes_one_and_comes_back_as_text(edit):
    made = parse_edit(edit.example)
    assert type(made) is edit
    assert str(made) == edit.example


@edits
def test_an_edit_says_all_that_a_user_must_know_of_it(edit):
    made = parse_edit(edit.example)
    for text in (edit.summary, edit.needs, edit.assumes, edit.source, made.describe(), made.how()):
        assert text == text.strip() != ""
        assert "\n" not in text
        assert not text.endswith(".")
    assert 0 <= made.doubt <= 1
    assert all(key.help for key in keys_of(edit).values())


def test_the_page_about_edits_is_the_one_their_declarations_make():
    text = PAGE.read_text()
    assert generate(text) == text, "run `python -m dpro.replay.whatif.registry docs/reference/edits.md`"


@edits
def test_help_and_list_name_every_edit(edit):
    assert edit.example in dict(help_rows())
    unproven = " (unproven)" if edit.is_advice and not edit.proof else ""
    assert f"  {edit.name}: {edit.summary}{unproven}" in list_text().splitlines()
    assert dict(help_rows())[edit.example] == f"{edit.summary}{unproven}"


def test_the_commands_help_shows_the_example_of_every_edit():
    shown = whatif.get_help(click.Context(whatif, info_name="whatif", terminal_width=110))
    for edit in all_kinds():
        assert edit.example in shown


def test_an_edit_is_a_class_that_must_say_how_it_is_applied():
    with pytest.raises(TypeError):
        Edit()  # type: ignore[abstract]


@pytest.mark.parametrize(("command", "name"), [("goodput", "checkpoint"), ("serving", "max-batch")])
def test_a_change_that_another_command_predicts_is_refused_with_that_command(command, name):
    example = changes_by_command()[command][name].example
    with pytest.raises(UsageError, match=re.escape(f"dpro {command} RUN --edit {example}")):
        parse_edit(example)


def test_commands_refuse_changes_of_each_other_and_name_the_nearest_of_their_own():
    changes = changes_by_command()
    with pytest.raises(UsageError, match=re.escape("dpro whatif RUN --edit heal:rank=1")):
        apply_change(None, "heal:rank=1", changes["goodput"])
    with pytest.raises(UsageError, match=r"no change 'spare'.*spares"):
        apply_change(None, "spare:hosts=2", changes["goodput"])
    with pytest.raises(UsageError, match=r"no edit 'chekpoint' \(did you mean 'checkpoint'\?\)"):
        parse_edit("chekpoint:every=5")


def test_the_list_has_every_change_of_every_command():
    listed = list_text()
    for changes in changes_by_command().values():
        assert all(f"--edit '{change.example}'" in listed for change in changes.values())
