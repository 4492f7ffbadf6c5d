"""What `dpro try` refuses before it records anything."""

from __future__ import annotations

import pytest

from dpro.extensions.tensors.plan_file import PlannedReduction, TensorPlan, write_plan
from tests.commands import dpro

JOB = ("--", "python", "train.py")


@pytest.fixture(autouse=True)
def plan(tmp_path, monkeypatch):
    """A plan with an edit that cannot be tried, and one that can."""
    monkeypatch.chdir(tmp_path)
    for name, edit in (("plan.json", "gc"), ("odd.json", "heal:rank=1")):
        write_plan(TensorPlan((PlannedReduction(("head.weight",)),), (edit,)), tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (JOB, "no change given: dpro try EDIT... -- COMMAND..., or --plan FILE"),
        (("--plan", "plan.json"), "no command given"),
        (("--plan", "none.json", *JOB), "'none.json' does not exist"),
        (("--plan", "plan.json", "tensors:plan=plan.json", *JOB), "tensors is given twice"),
        (("--plan", "plan.json", "bucket:mb=1", *JOB), "the plan chooses the buckets"),
        (("--plan", "plan.json", "gc:every=2", *JOB), "gc is given twice"),
        (("--plan", "odd.json", *JOB), "heal can be predicted (dpro whatif), but not applied to a job"),
    ],
)
def test_what_cannot_be_tried_is_one_line(tmp_path, arguments, message):
    done = dpro("try", *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "odd.json"}
