"""Numbers that go bad are named by their first rank and step; ordinary training is not."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
import pytest

from dpro.detect.bad_numbers import MAX_SKIPPED, ComparedTables, find_bad_numbers
from dpro.detect.findings import Finding
from dpro.detect.words import describe
from dpro.schema import CHECKPOINTS, COUNTERS, LOSSES, STEPS, WORKERS, conform
from dpro.units import NS_PER_S
from dpro.verdict.verdict import fault_in_words
from tests.unit.detect.loss_curves import CALM, ORDINARY, curve
from tests.unit.detect.loss_curves import STEPS as LENGTH

NAN = float("nan")
NUM_STEPS, BAD = 120, 60


def ordinary(rank: int = 0) -> np.ndarray:
    return 2 + 0.05 * np.random.default_rng(rank).standard_normal(NUM_STEPS)


def table(values: np.ndarray, kind: str = "loss", scaled: bool = False) -> pl.DataFrame:
    """Rows of `losses`, of numbers by rank and step."""
    ranks, steps = np.indices(np.atleast_2d(values).shape)
    columns = {"rank": ranks.ravel(), "step": steps.ravel(), "value": np.ravel(values)}
    rows = pl.DataFrame(columns).with_columns(
        time_ns=pl.col("step") * NS_PER_S, kind=pl.lit(kind), scaled=pl.lit(scaled)
    )
    return conform(LOSSES, rows)


def workers(num_ranks: int, gpu: bool = False) -> pl.DataFrame:
    ranks = [*range(num_ranks)]
    on = {"gpu_uuid": [f"g{rank}" for rank in ranks], "gpu_name": ["H200"] * num_ranks} if gpu else {}
    return conform(WORKERS, pl.DataFrame({"rank": ranks, "host": [f"n{rank}" for rank in ranks], **on}))


def steps(num_ranks: int, longer: Mapping[tuple[int, int], float] | None = None) -> pl.DataFrame:
    """A step a second, some of which take longer."""
    rows = [
        (rank, step, step * NS_PER_S, int(NS_PER_S * (longer or {}).get((rank, step), 0.9)))
        for rank in range(num_ranks)
        for step in range(1, NUM_STEPS)
    ]
    return conform(
        STEPS, pl.DataFrame(rows, schema=["rank", "step", "start_ns", "duration_ns"], orient="row")
    )


def counter(name: str, values: Mapping[tuple[int, int], float], usual: float, num_ranks: int) -> pl.DataFrame:
    """A counter of steps."""
    rows = [
        (rank, name, step * NS_PER_S, float(values.get((rank, step), usual)))
        for rank in range(num_ranks)
        for step in range(1, NUM_STEPS)
    ]
    frame = pl.DataFrame(rows, schema=["rank", "counter", "time_ns", "value"], orient="row")
    return conform(COUNTERS, frame)


def look(losses: pl.DataFrame, *counters: pl.DataFrame, **other: pl.DataFrame) -> list[Finding]:
    num_ranks = losses["rank"].n_unique()
    tables = {"steps": steps(num_ranks), "checkpoints": CHECKPOINTS.empty(), "workers": workers(num_ranks)}
    tables |= other
    around = ComparedTables(tables["steps"], pl.concat([COUNTERS.empty(), *counters]), tables["checkpoints"])
    return find_bad_numbers(losses, tables["workers"], around)


def kinds(finding: Finding) -> list[str]:
    return [one.kind for one in finding.observations]


def poisoned(num_ranks: int = 3, rank: int = 1) -> np.ndarray:
    """One rank's loss is not finite, and from the next step on all are."""
    values = np.array([ordinary(each) for each in range(num_ranks)])
    values[rank, BAD], values[:, BAD + 1 :] = NAN, NAN
    return values


# Numbers that are not finite.


def test_the_first_rank_and_step_is_named_and_who_followed():
    norms = np.where(np.arange(NUM_STEPS) < BAD, 1.0, NAN)
    losses = pl.concat([table(poisoned()), table(np.array([norms] * 3), "grad_norm")])
    (finding,) = look(losses)
    assert (finding.class_, finding.component, finding.ranks) == ("loss.not_finite", "rank 1", (1,))
    words = describe(finding)
    assert words.headline == "not finite: rank 1 (loss NaN in step 60); confidence 0.98"
    assert fault_in_words([finding]) == "rank 1 (loss NaN in step 60)."
    first, norm, others, stays, where, nothing = finding.observations
    assert first.values["step"] == BAD
    assert first.text.startswith("the loss of rank 1 is NaN in step 60: the first number that is not finite")
    assert norm.values["norm_ranks"] == [0, 1, 2]
    assert (others.values["next_step"], others.values["ill_ranks"]) == (61, [0, 2])
    assert stays.text == "no step is finite on all ranks in the 59 steps since"
    assert where.text == "rank 1 runs on host n1"
    assert nothing.kind == "nothing-differs"
    assert finding.remedy.startswith("look at the batch of rank 1 in step 60, and run it on another host")


def test_of_a_rank_on_a_gpu_the_gpu_is_named():
    (finding,) = look(table(poisoned()), workers=workers(3, gpu=True))
    assert "rank 1 runs on host n1, GPU g1 (H200)" in finding.evidence
    assert "another GPU" in finding.remedy


def test_a_number_that_is_finite_again_is_said_to_be_and_the_others_stay_well():
    values = np.array([ordinary(), ordinary(1)])
    values[0, [BAD, BAD + 2]] = np.inf
    (finding,) = look(table(values))
    assert finding.cause == "loss infinite in step 60"
    assert "the losses of rank 1 stay finite" in finding.evidence
    (again,) = [one for one in finding.observations if one.kind == "finite-again"]
    assert again.values == {"again_step": 61, "later_bad_steps": 1}


def test_where_all_ranks_go_bad_at_once_none_is_named():
    values = np.array([ordinary(), ordinary(1)])
    values[:, BAD:] = NAN
    (finding,) = look(table(values))
    assert (finding.of_job, finding.ranks) == (True, (0, 1))
    assert fault_in_words([finding]) == "loss NaN on all ranks in step 60."
    assert "runs-on" not in kinds(finding)
    assert "the data of step 60, or the update before it" in finding.remedy


def test_a_norm_that_is_not_finite_before_any_loss_is_of_the_backward():
    norms = np.array([[1.0] * BAD + [np.inf] * (NUM_STEPS - BAD)] * 2)
    losses = pl.concat([table(np.array([ordinary(), ordinary(1)])), table(norms, "grad_norm")])
    (finding,) = look(losses)
    assert finding.cause == "gradient norm infinite on all ranks in step 60"
    assert "the backward of step 60" in finding.remedy


def test_of_the_only_rank_the_data_and_the_update_before_are_to_be_looked_at():
    (finding,) = look(table(np.where(np.arange(NUM_STEPS) < BAD, ordinary(), NAN)))
    assert (finding.component, kinds(finding)[-2:]) == ("rank 0", ["runs-on", "nothing-differs"])
    assert finding.remedy.startswith("look at the data of step 60, or the update before it")


def test_neighbours_that_go_bad_together_are_named_together():
    values = poisoned(4)
    values[2, BAD] = NAN
    (finding,) = look(table(values))
    assert (finding.component, finding.ranks) == ("ranks 1-2", (1, 2))


def test_updates_that_a_scaler_skips_are_no_fault_until_they_do_not_end():
    norms = np.ones(NUM_STEPS)
    norms[:MAX_SKIPPED], norms[40] = np.inf, NAN
    assert look(pl.concat([table(ordinary()), table(norms, "grad_norm", scaled=True)])) == []
    norms[50 : 51 + MAX_SKIPPED] = np.inf
    (finding,) = look(pl.concat([table(ordinary()), table(norms, "grad_norm", scaled=True)]))
    assert finding.cause == "gradient norm infinite in step 50"
    (finding,) = look(table(np.where(np.arange(NUM_STEPS) == 3, NAN, norms[45]), scaled=True))
    assert finding.cause == "loss NaN in step 3"  # of a loss no update is skipped


def test_numbers_of_a_step_that_never_ended_count_and_those_of_no_step_do_not():
    losses = table(np.append(ordinary(), NAN))
    (finding,) = look(losses)
    assert finding.cause == f"loss NaN in step {NUM_STEPS}"
    assert look(losses.with_columns(step=pl.lit(-1, pl.Int64))) == []


def test_a_run_without_losses_has_no_bad_ones():
    assert look(LOSSES.empty()) == []
    assert look(table(np.array([1.0]))) == []


# Jumps.


def test_a_jump_of_one_batch_is_named_and_that_it_is_over():
    values = np.array([ordinary(), ordinary(1)])
    values[1, BAD] *= 3
    (finding,) = look(table(values))
    assert (finding.class_, finding.ranks, finding.confidence) == ("loss.jump", (1,), 0.7)
    assert finding.title == "jump: rank 1"
    seen, over, *_ = finding.observations
    assert (seen.values["after"], seen.values["step"]) == (values[1, BAD], BAD)
    assert over.values["back_step"] == BAD + 1


def test_a_jump_that_lasts_is_said_to():
    values = ordinary()
    values[BAD:] *= 10
    (finding,) = look(table(values))
    assert finding.evidence[1] == "it has not come back in the 59 steps since"
    assert finding.confidence == 0.9


def test_a_jump_before_a_number_is_not_finite_is_a_finding_of_its_own():
    values = ordinary()
    values[BAD:], values[BAD + 5 :] = 90.0, NAN
    assert [one.class_ for one in look(table(values))] == ["loss.not_finite", "loss.jump"]


def test_a_jump_of_the_norm_alone_is_larger():
    norms = np.ones(NUM_STEPS)
    norms[BAD] = 3.0
    assert look(pl.concat([table(ordinary()), table(norms, "grad_norm")])) == []
    norms[BAD] = 30.0
    (finding,) = look(pl.concat([table(ordinary()), table(norms, "grad_norm")]))
    assert finding.cause == "gradient norm 30 after 1 in step 60"


def test_several_losses_of_a_step_are_one_number():
    """As of a generator and its opponent, in turn."""
    both = [table(ordinary()), table(40 + ordinary(1))]
    assert look(pl.concat(both)) == []


def test_ordinary_training_is_not_named():
    """150 curves of 12 kinds, 1,200 steps each: at most one false alarm."""
    alarms = [number for number in range(150) if find_bad_numbers(table(curve(number)), workers(1))]
    assert len(alarms) <= 1, [ORDINARY[number % len(ORDINARY)].__name__ for number in alarms]


@pytest.mark.parametrize(("times", "lasts", "least"), [(3, 1, 7), (3, 10, 7), (10, 1, 16), (10, 300, 16)])
def test_spikes_in_calm_training_are_found(times, lasts, least):
    """Of 20 curves with a noise of 1 to 30%: most of ten times the level; of three times where it is calm."""
    found = 0
    for number in range(20):
        values, at = curve(number, CALM), int(np.random.default_rng(number).integers(100, LENGTH - 100))
        values[at : at + lasts] *= times
        findings = find_bad_numbers(table(values), workers(1))
        found += [one.observations[0].values["step"] for one in findings] == [at]
    assert found >= least


# What differed.


def test_a_batch_that_is_larger_than_before_is_said_with_that_of_the_others():
    sizes = counter("step_input_elements", {(1, BAD): 5000}, 1000, 3)
    (finding,) = look(table(poisoned()), sizes)
    assert finding.evidence[-1] == (
        "on rank 1 the batches have 5,000 elements, in its steps before at most 1,000, "
        "and on other ranks 1,000"
    )
    assert "nothing-differs" not in kinds(finding)


def test_a_batch_that_is_smaller_differs_and_a_step_that_is_shorter_does_not():
    sizes = counter("step_input_elements", {(1, BAD): 8}, 1000, 3)
    (finding,) = look(table(poisoned()), sizes, steps=steps(3, {(1, BAD): 0.1}))
    assert kinds(finding)[-1] == "differs-step-input-elements"
    assert "at least 1,000" in finding.evidence[-1]


def test_a_step_that_took_longer_and_evaluated_is_said():
    evaluation = counter("step_no_grad_ns", {(1, BAD): 3e9}, 1e6, 3)
    (finding,) = look(table(poisoned()), evaluation, steps=steps(3, {(1, BAD): 5.0}))
    longer, evaluates = finding.observations[-2:]
    assert longer.text.startswith("on rank 1 the step takes 5 s, in its steps before at most 900 ms")
    assert evaluates.kind == "differs-step-no-grad"


def test_a_checkpoint_that_was_just_loaded_is_said_and_is_what_to_compare():
    rows = {"rank": [1, 1], "kind": ["load"] * 2, "start_ns": [3 * NS_PER_S, (BAD - 1) * NS_PER_S + 5]}
    loaded = conform(CHECKPOINTS, pl.DataFrame({**rows, "path": ["old.pt", "new.pt"]}))
    (finding,) = look(table(poisoned()), checkpoints=loaded)
    assert finding.evidence[-1] == "rank 1 loaded a checkpoint at most 3 steps before: new.pt"
    assert "before the checkpoint was saved" in finding.remedy
    (finding,) = look(table(poisoned()), checkpoints=loaded.head(1))
    assert "loaded-before" not in kinds(finding)


def test_what_the_gpu_reported_around_the_step_is_evidence_and_the_remedy():
    rows = [
        (device, name, second * NS_PER_S, value)
        for device in ("g0", "g1", "g2")
        for second in range(400)
        for name, value in (
            ("sampling_us", 90.0),
            ("ecc_corrected", 0.0 if device != "g1" or second < 280 else 7.0 * (second - 279)),
            *((("xid", 94.0),) if (device, second) == ("g1", 300) else ()),
        )
    ]
    columns = dict(zip(("device", "counter", "time_ns", "value"), zip(*rows, strict=True), strict=True))
    hosts = pl.col("device").str.replace("g", "n")
    sampled = conform(COUNTERS, pl.DataFrame({**columns, "rank": [-1] * len(rows)}).with_columns(host=hosts))
    later = steps(3).with_columns(pl.col("start_ns") + 240 * NS_PER_S)
    (finding,) = look(table(poisoned()), sampled, steps=later, workers=workers(3, gpu=True))
    errors, corrected = finding.observations[-2:]
    assert "XID 94" in errors.text
    assert "corrected ECC errors" in corrected.text
    assert finding.remedy.startswith("drain the host")


def test_of_a_job_that_runs_nothing_is_compared():
    (finding,) = find_bad_numbers(table(poisoned()), workers(3))
    assert kinds(finding)[-1] == "runs-on"
