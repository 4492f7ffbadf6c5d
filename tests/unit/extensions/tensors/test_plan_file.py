"""The file of a tensor plan: there and back, and one line for each way in which it is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import DproError, InputError, UsageError
from dpro.extensions.tensors.plan_file import PlannedReduction, TensorPlan, read_plan, write_plan

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)


@given(
    st.lists(names, min_size=1, max_size=8, unique=True),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["", "bf16", "fp16"])), min_size=8, max_size=8),
    st.lists(names, max_size=3),
    names,
)
def test_what_is_written_is_read(tmp_path_factory, gradients, ways, edits, made_from):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    each = tuple(PlannedReduction((name,), *way) for name, way in zip(gradients, ways))
    together = (PlannedReduction(tuple(gradients)),)
    for reductions in (each, together):
        plan = TensorPlan(reductions, tuple(edits), made_from)
        write_plan(plan, path)
        assert read_plan(path) == plan


WHOLE = {"tensor_plan": 1, "made_from": "", "reductions": [{"gradients": ["a"]}], "edits": []}


def _with(**reduction: object) -> dict[str, object]:
    return WHOLE | {"reductions": [{"gradients": ["a"]} | reduction]}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "no key `tensor_plan`"),
        ({}, "no key `tensor_plan`"),
        (WHOLE | {"tensor_plan": 2}, "a tensor plan of version 2, and this dpro reads version 1"),
        (WHOLE | {"reductions": []}, "no reductions"),
        (WHOLE | {"reductions": "a"}, "no reductions"),
        (WHOLE | {"reductions": ["a"]}, "reduction 0: must be an object"),
        (_with(gradients=[]), "reduction 0: it has no gradients"),
        (_with(gradients=[1]), "names of parameters"),
        (_with(gradients=["a", "a"]), "gradient a is reduced twice"),
        (WHOLE | {"reductions": 2 * [{"gradients": ["a"]}]}, "gradient a is reduced twice"),
        (_with(pieces=0), "pieces must be a whole number from 1"),
        (_with(pieces=1.5), "pieces must be a whole number from 1"),
        (_with(pieces=True), "pieces must be a whole number from 1"),
        (_with(reduce_in="int8"), 'reduce_in must be "", "bf16" or "fp16", not "int8"'),
        (_with(bucket=1), "no key 'bucket'"),
        (WHOLE | {"edits": [1]}, "`edits` must be a list"),
        (WHOLE | {"edits": "compile"}, "`edits` must be a list"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_in_a_line(tmp_path, document, said):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert said in _refusal(path, InputError)


def test_a_file_that_is_not_there_is_refused_with_how_to_make_one(tmp_path):
    assert "--make-plan" in _refusal(tmp_path / "plan.json", UsageError)


@pytest.mark.parametrize(("content", "said"), [(b"{", "not JSON"), (b"\xff", "cannot be read")])
def test_a_file_that_is_not_json_is_refused(tmp_path, content, said):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert said in _refusal(path, InputError)


def test_a_plan_without_names_is_known_by_them():
    assert not TensorPlan((PlannedReduction(("#1", "#0")),)).has_names
    assert TensorPlan((PlannedReduction(("a#1",)),)).has_names


def _refusal(path: Path, kind: type[DproError]) -> str:
    with pytest.raises(kind) as refused:
        read_plan(path)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(str(path))
    return line
