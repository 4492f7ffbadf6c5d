"""Phases of reinforcement learning: steps made by hand, and the names of frameworks."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from dpro.replay.phases import (
    ADVANTAGE,
    LOGPROBS,
    REST,
    REWARD,
    ROLLOUT,
    SYNC,
    TRAINING,
    in_words,
    limit_in_words,
    phase_of,
    phases,
)
from dpro.schema import COLLECTIVES, SPANS, STEPS
from tests.builders import TinyRun


def of(run: TinyRun, folder: Path) -> pl.DataFrame:
    written = run.write(folder / "run")
    return phases(written.table(SPANS), written.table(COLLECTIVES), written.table(STEPS))


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("GRPOTrainer._generate_and_score_completions", ROLLOUT),
        ("GRPOTrainer.transformers.generate", ROLLOUT),
        ("GRPOTrainer._calculate_rewards", REWARD),
        ("GRPOTrainer._get_per_token_logps_and_entropies", LOGPROBS),
        ("GRPOTrainer.compute_loss", TRAINING),
        ("GRPOTrainer.sync_weights", SYNC),
        ("Trainer.training_step", TRAINING),
        ("gen", ROLLOUT),
        ("generate_sequences", ROLLOUT),
        ("old_log_prob", LOGPROBS),
        ("compute_ref_log_prob", LOGPROBS),
        ("adv", ADVANTAGE),
        ("update_actor", TRAINING),
        ("update_weights", SYNC),
        ("compute_rm_score", REWARD),
        ("policy_training", TRAINING),
        ("WorkerDict.actor_rollout_generate_sequences", ROLLOUT),
        ("WorkerDict.ref_compute_ref_log_prob", LOGPROBS),
        ("WorkerDict.actor_rollout_update_actor", TRAINING),
        ("waits for Rollout.generate", ROLLOUT),
        ("Trainer.update", TRAINING),
        ("dpro::backward", TRAINING),
        ("Optimizer.step#AdamW.step", TRAINING),
        ("regenerate", None),
        ("trainer", None),
        ("advance", None),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", None),
        ("DistributedDataParallel.forward", None),
    ],
)
def test_names_of_frameworks_say_their_phase_and_others_none(name, phase):
    assert pl.DataFrame({"name": [name]}).select(phase_of()).item() == phase


def a_step(run: TinyRun, rank: int, rollout_ends: float, begin: float = 0) -> None:
    """A step of 100 us: a rollout with scores in it, a training with log probabilities in its loss."""
    run.step(round(begin / 100), begin, begin + 100, rank)
    run.mark("rollout", begin + 10, begin + 60, rank)
    run.op("aten::mm", begin + 10, begin + rollout_ends, rank)
    run.mark("Trainer._calculate_rewards", begin + 50, begin + 56, rank)
    run.mark("Trainer.compute_loss", begin + 60, begin + 80, rank)
    run.mark("Trainer._get_per_token_logps", begin + 62, begin + 70, rank)
    run.mark("dpro::backward", begin + 80, begin + 90, rank)


def test_a_moment_is_of_the_innermost_phase_and_what_has_none_is_the_rest(tmp_path):
    run = TinyRun()
    for begin in (0, 100):
        a_step(run, 0, 46, begin)
    table = of(run, tmp_path)
    times = dict(table.select("phase", pl.col("duration_ns") / 1_000).iter_rows())
    assert times == {ROLLOUT: 44.0, TRAINING: 30.0, REST: 20.0, REWARD: 6.0}
    assert table["share"].sum() == pytest.approx(1)
    rollout = table.row(0, named=True)
    assert (rollout["compute_ns"], rollout["host_bound_ns"]) == (36_000, 8_000)
    assert limit_in_words(rollout) == "82% of it compute"
    assert in_words(table) == ""  # no phase takes half of the step


def test_a_phase_that_dominates_names_the_rank_that_others_wait_for(tmp_path):
    run = TinyRun()
    for rank, own in ((0, 20), (1, 70)):
        run.step(0, 0, 100, rank)
        run.mark("generate", 0, 80, rank)
        run.op("aten::mm", 0, own, rank)
        run.gloo((own, own + 1), (own + 1, 80), rank, group_ranks="0-1", sequence=1, group="a")
        run.op("aten::wait", own + 1, 1 + own, rank)
        run.mark("train", 80, 100, rank)
    assert in_words(of(run, tmp_path)).startswith("rollout takes 80% of a step, 80 us, 57% of it compute")
    waiting = of(run, tmp_path / "again").row(0, named=True)
    assert waiting["latest"] == 1
    assert waiting["exposed_wait_ns"] > 20_000


@pytest.mark.parametrize("names", [("train", "forward"), ("generate", "decode"), ()])
def test_a_job_without_rollout_or_training_has_no_phases(tmp_path, names):
    run = TinyRun()
    run.step(0, 0, 100)
    run.op("aten::mm", 0, 90)
    for place, name in enumerate(names):
        run.mark(name, 10 * place, 10 * place + 5)
    table = of(run, tmp_path)
    assert table.is_empty()
    assert in_words(table) == ""
