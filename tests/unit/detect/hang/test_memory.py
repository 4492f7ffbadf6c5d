"""What filled a GPU's memory, in findings: tables written by hand."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.detect.findings import Finding
from dpro.detect.hang.evidence import advice_in_words, verdict_in_words
from dpro.detect.hang.memory import (
    CAUSE,
    FREE,
    OUTSIDE,
    UNHELD,
    UNKNOWN,
    describe_survivors,
    filled_by,
    with_memory,
)
from dpro.detect.observations import Observation, observe
from dpro.schema import OUT_OF_MEMORY, WORKERS, conform
from dpro.store import open_run, write_part
from tests.builders import cpu_job

GB = 10**9
ERROR = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\njob.py:7 step"
KILLED = (
    "host: the kernel killed 1 process(es) for lack of memory, of the job or of others, while the job ran"
)


def refused(**facts: Any) -> pl.DataFrame:
    row = {
        "rank": 3,
        "time_ns": 5,
        "device": 0,
        "requested_bytes": 2 * GB,
        "total_bytes": 80 * GB,
        "free_bytes": 1 * GB,
        "allocated_bytes": 71 * GB,
        "reserved_bytes": 72 * GB,
        "largest_free_bytes": GB // 2,
        "phase": "forward",
        "module": "layers.7.mlp MLP",
        "calls": "/lib/python3.11/site-packages/torch/f.py:1 linear\n/job/model.py:31 forward",
        "kinds": ["optimizer state", "parameters", "optimizer state", UNHELD],
        "names": ["layers.*.mlp", "layers.*.mlp", "embed", ""],
        "bytes": [40 * GB, 20 * GB, 4 * GB, 7 * GB],
    }
    return conform(OUT_OF_MEMORY, pl.DataFrame([row | facts]))


def workers(*errors: str) -> pl.DataFrame:
    return conform(
        WORKERS, pl.DataFrame([{"rank": rank, "error": error} for rank, error in enumerate(errors)])
    )


def dead(rank: int, *observations: Observation) -> Finding:
    return Finding("dead.rank", "rank", str(rank), (rank,), 1.0, 0.9, 0.0, observations)


def ended_by(exit_signal: int) -> Observation:
    return observe("death", "rank {rank} was ended", rank=0, exit_signal=exit_signal)


def test_a_rank_that_ran_out_of_memory_says_what_filled_it_and_what_to_do():
    (finding,) = with_memory(
        [dead(3, observe("test", "it ended"))], refused(), workers("", "", "", ERROR), []
    )
    assert (finding.cause, filled_by(finding)) == (CAUSE, "optimizer state")
    observed = {one.kind: one.values for one in finding.observations}
    assert observed["memory-asked-for"]["requested_bytes"] == 2 * GB
    assert observed["memory-of-others"]["outside_bytes"] == (80 - 1 - 72) * GB
    assert finding.evidence[1:] == (
        "2.0 GB were requested by layers.7.mlp MLP in the forward (/job/model.py:31 forward) with 71.0 GB of "
        "80.0 GB in use by PyTorch",
        "44.0 GB optimizer state: layers.*.mlp 40.0 GB, embed 4.0 GB",
        "20.0 GB parameters: layers.*.mlp 20.0 GB",
        "7.0 GB held by no Python object",
        "7.0 GB in use by CUDA, its libraries, and other processes",
        "not known: which lines allocated what is held by no Python object; no history was recorded",
    )
    assert "memory ran out; what filled it most: optimizer state" in verdict_in_words(finding)
    assert "ZeRO" in advice_in_words(finding, WORKERS.empty())


@pytest.mark.parametrize(
    ("facts", "most", "advice"),
    [
        ({"allocated_bytes": 40 * GB, "kinds": [], "names": [], "bytes": []}, FREE, "expandable_segments"),
        ({"reserved_bytes": 9 * GB, "allocated_bytes": 9 * GB, "kinds": ["parameters"], "names": [""],
          "bytes": [9 * GB]}, OUTSIDE, "nvidia-smi"),
        ({"kinds": ["activations"], "names": [""], "bytes": [70 * GB]}, "activations", "micro-batch"),
        ({"kinds": ["parameters"], "names": [""], "bytes": [GB]}, UNKNOWN, "micro-batch"),
    ],
)  # fmt: skip
def test_what_filled_the_memory_decides_the_advice(facts, most, advice):
    (finding,) = with_memory([dead(3)], refused(**facts), workers("", "", "", ERROR), [])
    assert (finding.cause, filled_by(finding)) == (CAUSE, most)
    assert advice in advice_in_words(finding, WORKERS.empty())


def test_all_ranks_that_ran_out_at_once_are_one_finding_though_none_was_first():
    (finding,) = with_memory([], refused(rank=1), workers(ERROR, ERROR), [])
    assert (finding.class_, finding.component, finding.ranks) == ("dead.rank", "ranks 0-1", (0, 1))
    assert "44.0 GB optimizer state" in "\n".join(finding.evidence)


def test_other_deaths_are_left_as_they_are_but_for_what_the_kernel_killed():
    plain = dead(0, ended_by(-1))
    assert with_memory([plain], refused(), workers("ValueError: no"), [KILLED]) == [plain]
    killed = dead(0, ended_by(9))
    (finding,) = with_memory([killed], OUT_OF_MEMORY.empty(), workers(""), [KILLED, "something else"])
    assert finding.evidence[1:] == (KILLED,)
    assert with_memory([], OUT_OF_MEMORY.empty(), workers(""), [KILLED]) == []


def test_a_rank_that_went_on_is_a_note_with_how_often_it_was_refused():
    rows = pl.concat([refused(rank=0), refused(rank=0, time_ns=9, requested_bytes=GB, refused=40)])
    (line,) = describe_survivors(pl.concat([rows, refused(rank=1)]), workers("", ERROR))
    assert line.startswith("rank 0 was refused memory 40 times and continued")
    assert "1.0 GB were requested by layers.7.mlp MLP" in line


def test_what_a_run_says_of_memory_that_was_refused_is_among_its_notes(tmp_path):
    run = cpu_job().write(tmp_path / "run")
    write_part(run.path, OUT_OF_MEMORY, "rank00000", refused(rank=0))
    (note,) = [note for note in Analysis(open_run(run.path)).notes([]) if "refused memory" in note]
    assert note.startswith("rank 0 was refused memory 1 time and continued")
