"""Edits as text: what is written is read back, and what is not an edit is refused in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import UsageError
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.communication import Network, NoCommunication
from dpro.replay.whatif.edits.heal import Heal, RanksAt
from dpro.replay.whatif.edits.host import NoLaunch
from dpro.replay.whatif.edits.selected_work import Drop, Remove, Replace, Scale, Slow
from dpro.replay.whatif.edits.training_loop import HideInput
from dpro.replay.whatif.graph_ops.selected import KINDS, NodeSelection
from dpro.replay.whatif.registry import EDITS, kind_named, parse_edit
from dpro.words import suggest

patterns = st.text("abcz:*_#() ", max_size=12).map(str.strip)
numbers = st.none() | st.integers(0, 5000)
selections = st.builds(
    NodeSelection,
    **dict.fromkeys(("name", "within", "module", "host", "op", "group"), patterns),
    **dict.fromkeys(("rank", "stage", "dp", "stream", "step"), numbers),
    kind=st.sampled_from(["", *KINDS]),
)
short_factors = st.integers(0, 400).map(lambda n: n / 100)


@given(
    st.one_of(
        st.builds(Scale, selections, short_factors),
        st.builds(Remove, selections),
        st.builds(Replace, selections, short_factors),
        st.builds(Heal, st.builds(RanksAt, st.integers(0, 100_000))),
        st.builds(
            Slow,
            st.builds(RanksAt, host=patterns.filter(bool)),
            factor=st.none() | short_factors,
            ms=short_factors,
        ),
        st.builds(Drop, dp=st.integers(0, 64)),
        st.builds(Network, short_factors.filter(bool)),
        st.sampled_from([NoCommunication(), NoLaunch(), HideInput()]),
    )
)
def test_an_edits_text_makes_an_equal_edit(edit):
    assert isinstance(edit, Edit)
    assert parse_edit(str(edit)) == edit


@pytest.mark.parametrize("edit", [Scale(NodeSelection(name="a"), 1 / 3), Network(1.2345678)])
def test_an_edits_text_keeps_all_digits_of_its_number(edit):
    assert parse_edit(str(edit)) == edit


def test_a_kernel_name_with_a_comma_in_it_can_be_typed():
    edit = Scale(NodeSelection(name="void copy<int, float>(int*)"), 0.5)
    assert parse_edit(str(edit)) == edit


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ("heal:rank=1", Heal(RanksAt(1))),
        ("network:bandwidth=2", Network(2.0)),
        ("network", Network(2.0)),
        ("scale:name=aten::mm,factor=0.5", Scale(NodeSelection(name="aten::mm"), 0.5)),
        (
            "scale:within=enumerate(DataLoader)*,rank=0,factor=0",
            Scale(NodeSelection("", "enumerate(DataLoader)*", rank=0), 0),
        ),
        (" no-comm ", NoCommunication()),
        ("no-launch", NoLaunch()),
        ("hide-input", HideInput()),
    ],
)
def test_what_the_help_text_shows_can_be_typed(text, edit):
    assert parse_edit(text) == edit


@pytest.mark.parametrize("name", EDITS)
def test_the_example_of_every_edit_is_one(name):
    example = kind_named(name).example
    assert str(parse_edit(example)) == example


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heel:rank=1", "(did you mean 'heal'?); `dpro whatif --list` has all"),
        ("no_launch", "did you mean 'no-launch'"),
        ("foo", "no edit 'foo'; `dpro whatif --list` has all"),
        ("zzz", "no edit 'zzz'; `dpro whatif --list` has all"),
        ("", "no edit ''; `dpro whatif --list` has all"),
        ("heal:rnk=1", "did you mean 'rank'"),
        ("heal", "heal needs one of rank=, host= and stage=, as in heal:rank=1"),
        ("heal:rank=1,stage=2", "heal needs one of"),
        ("slow:rank=1", "slow needs factor= or ms="),
        ("drop", "drop needs one of rank= and dp="),
        ("heal:rank=-1", "rank must be 0 or more"),
        ("replace:name=x", "replace needs us="),
        ("heal:rank=one", "rank must be a whole number, not 'one'"),
        ("heal:rank=1.5", "rank must be a whole number"),
        ("heal:rank", "rank needs a value"),
        ("heal:rank=1, hide-input", "heal: 'hide-input' is no key=value; write another edit separately"),
        ("heal:rank=1,slow:rank=2", "heal: 'slow:rank=2' is no key=value; write another edit separately"),
        ("heal:rank=", "rank needs a value"),
        ("scale:factor=fast", "factor must be a number, not 'fast'"),
        ("scale:factor=-1", "must be from 0 to"),
        ("scale:factor=nan", "must be from 0 to"),
        ("scale:kind=gpu", "no kind 'gpu'"),
        ("scale:step=x", "step must be a whole number"),
        ("network:bandwidth=0", "must be from 1e-06 to"),
        ("network:bandwidth=-2", "must be from 1e-06 to"),
        ("network:bandwidth=nan", "must be from 1e-06 to"),
        ("free-host:rank=1", "it takes none"),
        ("scale:nam=mm", "did you mean 'name'"),
    ],
)
def test_what_is_no_edit_is_refused_in_one_line_that_names_what_is(text, message):
    with pytest.raises(UsageError) as caught:
        parse_edit(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["scale:factor=inf", "scale:factor=1e300", "network:bandwidth=1e-300"])
def test_numbers_that_no_duration_can_take_are_refused(text):
    with pytest.raises(UsageError):
        parse_edit(text)


def test_a_key_given_twice_is_refused():
    with pytest.raises(UsageError):
        parse_edit("heal:rank=1,rank=2")


@pytest.mark.parametrize(
    ("word", "names", "meant"),
    [
        ("mp", ["mb", "every"], "mb"),
        ("fb16", ["fp16", "bf16"], "fp16"),
        ("x", ["k"], ""),
        ("nope", ["drop", "heal"], ""),
        ("toooy", ["topology", "toy"], "toy"),
    ],
)
def test_a_name_is_suggested_for_a_word_that_may_be_a_slip_of_it(word, names, meant):
    assert suggest(word, names) == (f" (did you mean {meant!r}?)" if meant else "")
