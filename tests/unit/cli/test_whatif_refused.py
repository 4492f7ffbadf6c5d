"""What `dpro whatif` says of edits that a run cannot answer."""

from __future__ import annotations

import polars as pl
import pytest
from click.testing import CliRunner

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.whatif import what_if
from dpro.cli import cli
from dpro.cli.whatif import refused_in_words
from dpro.extensions.trial.changes import how_to_try
from dpro.replay.whatif.predict import Prediction, Refusal
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import BUCKETS, OPERATIONS
from dpro.store import open_run, write_part
from dpro.table import complete
from tests.builders import gpu_job
from tests.jobs import ROOT
from tests.pipelines import Job
from tests.recorded_pipelines import recorded


def test_edits_that_are_refused_for_one_reason_share_a_line() -> None:
    refused = [Refusal("paths", "no topology"), Refusal("gc", "no pauses"), Refusal("spray", "no topology")]
    assert refused_in_words(refused) == [
        "not answered: paths, spray: no topology",
        "not answered: gc: no pauses",
    ]


def test_an_edit_that_was_written_on_two_lines_is_said_on_one() -> None:
    refused = [Refusal("remove:name=\ngemm", "nothing fits name=\ngemm")]
    assert refused_in_words(refused) == ["not answered: remove:name= gemm: nothing fits name= gemm"]


def test_operations_that_do_not_explain_their_steps_are_said_with_the_number(tmp_path) -> None:
    analysis = Analysis(recorded(Job(num_batches=4, num_steps=4, late=5.0).run(), tmp_path))
    assert analysis.operations is None
    assert analysis.why_no_operations.startswith("the trace does not explain 16.1% of the time")


def test_a_run_with_recorded_operations_is_not_asked_to_import_a_trace(tmp_path) -> None:
    pipeline = recorded(Job(num_batches=4, num_steps=4).run(), tmp_path / "pipeline")
    run = gpu_job().write(tmp_path / "run")
    elsewhere = pipeline.table(OPERATIONS).with_columns(step=pl.col("step") + 100)
    write_part(run.path, OPERATIONS, "rank00000", complete(OPERATIONS, elsewhere))
    edits = [parse_edit("pipeline:schedule=zb-h1")]
    [refused] = what_if(Analysis(open_run(run.path)), edits).document.refused
    assert refused.reason.startswith("forward and backward of micro-batches were recorded, but their replay")
    assert "import" not in refused.reason


@pytest.mark.parametrize(("source", "tried"), [("DeepSpeed ZeRO-2 buckets", False), ("DDP", True)])
def test_changes_to_ddp_are_tried_on_jobs_with_ddp_only(tmp_path, source, tried) -> None:
    run = gpu_job().write(tmp_path)
    row = pl.DataFrame({"rank": [0], "bucket": [0], "source": [source]})
    write_part(run.path, BUCKETS, "rank00000", complete(BUCKETS, row))
    again = open_run(run.path)
    edits = {name: (parse_edit(name),) for name in ("bucket:mb=1", "compress:to=bf16", "accumulate:steps=2")}
    said = {name: how_to_try([Prediction(edit, 2e6, 1.5, 1e6, 3e6)], again) for name, edit in edits.items()}
    assert bool(said["bucket:mb=1"]) is bool(said["compress:to=bf16"]) is tried
    assert said["accumulate:steps=2"] == "dpro try accumulate:steps=2 -- COMMAND"


def test_what_is_refused_alone_is_one_line():
    asked = CliRunner().invoke(
        cli, ["whatif", str(ROOT / "sample_traces" / "slow_rank"), "-e", "heal:rank=9"]
    )
    assert asked.exit_code == 1
    assert asked.output == "not answered: heal:rank=9: rank 9 is not in the run, which has ranks 0, 1\n"
