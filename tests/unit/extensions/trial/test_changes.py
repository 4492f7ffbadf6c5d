"""Changes from their text, and the map from what-if edits to them."""

import pytest

from dpro.errors import InputError, UsageError
from dpro.extensions.tensors.plan_file import PlannedReduction, TensorPlan, write_plan
from dpro.extensions.trial import inside
from dpro.extensions.trial.changes import (
    CHANGES,
    VARIABLE_EXAMPLE,
    changes_of_plan,
    ensure_compatible,
    kind_of_edit,
    parse_change,
)
from dpro.extensions.trial.probes import changes_nothing, ensure_probes_alone, probes_of
from dpro.replay.whatif.registry import EDITS, FAMILIES, all_kinds, parse_edit

PLAN = TensorPlan((PlannedReduction(("head.weight",)), PlannedReduction(("stem.weight", "stem.bias"))))


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files that examples name."""
    monkeypatch.chdir(tmp_path)
    write_plan(PLAN, tmp_path / "plan.json")


EXAMPLES = [row.example for row in CHANGES.values()] + [VARIABLE_EXAMPLE]


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_is_a_change_that_its_family_makes(example):
    change = parse_change(example)
    assert change.family in inside.FAMILIES
    pytest.importorskip("torch")
    assert callable(inside.family_of(change.family))


@pytest.mark.parametrize("example", EXAMPLES)
def test_where_an_edit_has_the_name_of_a_change_it_takes_the_same_text(example):
    change = parse_change(example)
    if example.partition(":")[0] in EDITS:
        assert change.edits == (example,)
        assert str(parse_edit(example)).startswith(example.partition(":")[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bukket:mb=1", "did you mean 'bucket'"),
        ("bucket:mp=1", "did you mean 'mb'"),
        ("bucket", "bucket needs mb, as in bucket:mb=25"),
        ("bucket:mb=0", "mb must be from 1e-06 to 1,000,000"),
        ("bucket:mb=x", "mb must be a number"),
        ("bucket:mb=1,mb=2", "given twice"),
        ("compress:to=fb16", "(did you mean 'fp16'?); there are fp16, bf16"),
        ("compress:to=fp16,powersgd_rank=2", "exclude each other"),
        ("compress:topk=0", "from 1e-06 to 1"),
        ("compress:topk=0.1,to=bf16", "exclude each other"),
        ("ddp:static_graph=yes", "true or false"),
        ("local-updates:every=1", "every must be from 2 to"),
        ("accumulate:steps=1", "steps must be from 2 to"),
        ("batch:factor=1", "from 1.01 to 1,024"),
        ("recompute", "recompute needs module"),
        ("algorithm:to=halving", "; there are ring, tree"),
        ("algorithm:proto=ll64", "there are ll, ll128, simple"),
        ("algorithm:to=ring,proto=ll", "not both"),
        ("slow:rank=1", "slow needs rank and ms"),
        ("slow:rank=1,factor=2", "no key 'factor'"),
        ("compress:module=layers.*", "module needs to="),
        ("optimizer:impl=fuse", "did you mean 'fused'"),
        ("heal:rank=1", "can be predicted (dpro whatif), but not applied to a job"),
        ("env:NCCL_ALGO", "needs a variable and its value"),
        ("env:MY_TOKEN=1", "recordings do not keep this variable"),
        ("env:RANK=1", "recordings do not keep this variable"),
    ],
)
def test_what_is_wrong_is_one_line_with_what_would_be_right(text, message):
    with pytest.raises(UsageError) as raised:
        parse_change(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("bucket:mb=2.5", "bucket:mb"),
        ("compress:powersgd_rank=4", "compress:powersgd_rank"),
        ("compress:topk=0.25", "compress:topk"),
        ("ddp:static_graph=true", "ddp:static_graph=true"),
        ("compile", "compile"),
        ("compile:mode=default", "compile"),
        ("compile:mode=reduce-overhead", "compile:mode=reduce-overhead"),
        ("env:NCCL_ALGO=Tree", "env:NCCL_ALGO"),
        ("tensors:plan=plan.json", "tensors"),
    ],
)
def test_changes_that_differ_in_numbers_only_are_of_one_kind(text, kind):
    assert parse_change(text).kind == kind


def test_workers_are_one_kind_of_change_however_they_are_asked_for():
    plain, among_others = (
        parse_change("workers:count=3"),
        parse_change("dataloader:workers=3,pin_memory=true"),
    )
    assert plain.edits == among_others.edits == ("workers:count=3",)
    assert plain.kind == among_others.kind == kind_of_edit("workers:count=8")
    assert parse_change("dataloader:pin_memory=true").edits == ()


def test_autocast_is_another_word_for_precision():
    first, second = parse_change("autocast:dtype=bf16"), parse_change("precision:dtype=bf16")
    assert (first.edits, first.kind, first.arguments) == (second.edits, second.kind, second.arguments)


def test_quotes_are_read_as_in_what_if_edits():
    assert parse_change('compress:to="bf16"').arguments == parse_change("compress:to=bf16").arguments
    for parse in (parse_change, parse_edit):
        with pytest.raises(UsageError, match="a quote is not closed"):
            parse('compress:to="bf16')
        with pytest.raises(UsageError, match="needs a value, as in"):
            parse("compress:to=")


def test_no_collection_at_all_may_be_asked_for_without_a_number():
    assert parse_change("gc").arguments == parse_change("gc:every=0").arguments == {"every": 0}


def test_half_of_all_edits_that_settings_or_code_make_can_be_tried():
    """Others are about other hardware or the fabric, or cannot be done at all: no job could try them."""
    outside = set(FAMILIES["Fabric"])
    possible = {kind.name for kind in all_kinds() if kind.effort not in ("money", "none")} - outside
    assert 2 * len(CHANGES.keys() & possible) >= len(possible)


def test_what_a_setting_or_a_line_changes_can_be_tried_but_for_what_needs_another_job():
    easy = {kind.name for kind in all_kinds() if kind.effort in ("flag", "line")}
    assert easy - CHANGES.keys() <= {"drop", "pipeline", "place", "reduce-last"}


@pytest.mark.parametrize("text", ["accumulate", "batch", "prefetch"])
def test_what_has_a_default_is_of_one_kind_with_and_without_it(text):
    given = {"accumulate": "steps=4", "batch": "factor=4", "prefetch": "ahead=2"}[text]
    assert parse_change(text).kind == parse_change(f"{text}:{given}").kind


def test_a_change_knows_how_many_more_samples_its_steps_and_passes_have():
    assert (parse_change("accumulate:steps=4").samples, parse_change("accumulate:steps=4").passes) == (4, 1)
    assert (parse_change("batch:factor=1.5").samples, parse_change("batch:factor=1.5").passes) == (1.5, 1.5)
    assert parse_change("bucket:mb=1").samples == 1


def test_modes_of_the_compiler_are_the_edits_that_they_are():
    assert parse_change("compile:mode=reduce-overhead").edits == ("compile", "cuda-graph")
    assert parse_change("compile:mode=max-autotune").edits == ()


def test_an_edit_that_cannot_be_tried_has_no_kind():
    assert kind_of_edit("heal:rank=1") == ""


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["bucket:mb=1", "bucket:mb=2"], "bucket is given twice"),
        (["compress:to=fp16", "local-updates:every=4"], "exclude each other"),
        (["accumulate:steps=2", "no-comm"], "accumulate excludes"),
        (["env:NCCL_ALGO=Tree"], "NCCL_ALGO is Tree here already"),
    ],
)
def test_what_cannot_be_changed_together_or_is_so_already_is_refused(texts, message):
    with pytest.raises(UsageError, match=message):
        ensure_compatible([parse_change(text) for text in texts], {"NCCL_ALGO": "Tree"})


def test_several_variables_may_be_set():
    ensure_compatible([parse_change("env:NCCL_ALGO=Ring"), parse_change("env:NCCL_PROTO=LL")], {})


def test_a_probe_changes_nothing_and_is_given_alone():
    probe = parse_change("compress:probe")
    assert (probe.is_probe, probe.family, probe.edits) == (True, "probes.compress", ())
    ensure_probes_alone([probe], 10)
    with pytest.raises(UsageError, match="without other changes"):
        ensure_probes_alone([probe, parse_change("bucket:mb=1")], 10)
    with pytest.raises(UsageError, match="--skip-steps 8"):
        ensure_probes_alone([probe], 5)
    with pytest.raises(UsageError, match="no key 'probe'"):
        parse_change("bucket:probe")


def test_a_budget_asks_for_a_probe_first():
    chosen, plain = parse_change("compress:budget=0.05"), parse_change("compress:to=bf16")
    assert [each.text for each in probes_of([chosen, plain, chosen])] == ["compress:probe"]
    assert chosen.edits == ("compress:budget=0.05",)
    assert chosen.kind == "compress:budget"
    assert changes_nothing("compress:probe")
    assert not changes_nothing("compress:to=bf16")
    assert not changes_nothing("what?")
    with pytest.raises(UsageError, match="exclude each other"):
        parse_change("compress:to=bf16,budget=0.1")


def test_fp8_is_refused_with_what_makes_it():
    with pytest.raises(UsageError, match="pip install torchao") as refused:
        parse_change("precision:dtype=fp8")
    assert "\n" not in str(refused.value)


def test_a_plan_is_read_before_anything_is_recorded(tmp_path):
    change = parse_change("tensors:plan=plan.json")
    plain = {"pieces": 1, "reduce_in": ""}
    assert change.arguments == {
        "reductions": [
            {"gradients": ("head.weight",), **plain},
            {"gradients": ("stem.weight", "stem.bias"), **plain},
        ]
    }
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        parse_change("tensors:plan=plan.json")
    assert kind_of_edit("tensors:plan=plan.json") == ""
    write_plan(TensorPlan((PlannedReduction(("#0", "#1")),)), tmp_path / "plan.json")
    with pytest.raises(UsageError, match="its gradients have no names"):
        parse_change("tensors:plan=plan.json")
    assert kind_of_edit("tensors:plan=plan.json") == ""


def test_a_plan_is_tried_with_the_edits_that_belong_to_it(tmp_path):
    file = tmp_path / "my plan.json"
    write_plan(TensorPlan(PLAN.reductions, ("optimizer:impl=fused",)), file)
    first, second = map(parse_change, changes_of_plan(file))
    assert (first.kind, second.kind) == ("optimizer:impl=fused", "tensors")
    assert second.arguments == parse_change("tensors:plan=plan.json").arguments


@pytest.mark.parametrize(
    ("reduction", "other", "message"),
    [
        (PLAN.reductions[0], "bucket:mb=1", "the plan chooses the buckets"),
        (PlannedReduction(("a",), pieces=2), "compress:to=bf16", "one communication hook"),
        (PlannedReduction(("a",), reduce_in="fp16"), "no-comm", "one communication hook"),
        (PLAN.reductions[0], "compress:to=bf16", ""),
    ],
)
def test_what_excludes_a_plan_is_refused(tmp_path, reduction, other, message):
    write_plan(TensorPlan((reduction,)), tmp_path / "plan.json")
    both = [parse_change("tensors:plan=plan.json"), parse_change(other)]
    if not message:
        ensure_compatible(both, {})
        return
    with pytest.raises(UsageError, match=message):
        ensure_compatible(both, {})
