"""Real two-rank jobs that lose time in some steps only: what `dpro diagnose` says of their recordings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT, complete, record

pytest.importorskip("torch")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
JOB = str(ROOT / "tests" / "pausing.py")
KINDS = {  # of the job: what is at fault, what of, what to do
    "collection": ("rank", "0", "garbage collection", "gc.freeze()"),
    "validation": ("rank", "0", "validation", "validate on all ranks"),
    "checkpoint": ("rank", "0", "checkpoint", "async_save"),
    "loader": ("job", "loader restart", "", "persistent_workers=True"),
    "compile": ("job", "compilation", "", "dynamic=True"),
    "sleep": ("rank", "0", "unknown wait", "see what the training loop does"),
}


def diagnosed(folder: Path, kind: str) -> tuple[list[dict[str, object]], list[str]]:
    record(folder, [*TORCHRUN, JOB, kind])
    dpro = [sys.executable, "-m", "dpro", "diagnose", "run"]
    document = json.loads(complete([*dpro, "--json"], folder).stdout)
    return document["findings"], complete(dpro, folder).stdout.decode().splitlines()


@pytest.mark.slow
def test_a_validation_on_all_ranks_of_a_real_job_is_a_note_and_no_finding(tmp_path):
    findings, lines = diagnosed(tmp_path, "validation-all")
    assert not [each for each in findings if each["class"] == "pauses"]
    assert any("note: all ranks validate" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_time_that_a_real_job_loses_in_every_tenth_step_is_named_with_its_cause_and_what_to_do(
    kind, tmp_path
):
    of, id_, cause, do = KINDS[kind]
    findings, lines = diagnosed(tmp_path, kind)
    finding = next(each for each in findings if each["class"] == "pauses")
    assert finding["component"] == {"kind": of, "id": id_}
    assert finding["severity"] > 0.2
    component = id_ if of == "job" else f"{of} {id_}"
    assert lines[0].startswith(f"pauses: {component}{f' ({cause})' if cause else ''} costs ")
    assert "every 10th step" in lines[1]
    assert do in next(line for line in lines if line.startswith("  do: "))
    assert not any(each["class"] == "imbalance.data" for each in findings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "persistent"])
def test_job_without_pauses_has_none(kind, tmp_path):
    findings, _ = diagnosed(tmp_path, kind)
    assert not any(each["class"] == "pauses" for each in findings)
