"""The commands that analyse a run, as a user or a program calls them: output, errors and exit codes."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.analysis.answers.whatif import what_if
from dpro.analysis.summary import HEADINGS, WORTH_SHOWING
from dpro.cli import main
from dpro.cli.analysis import analyse
from dpro.cli.whatif import ROWS
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.selection import is_in_ranges
from dpro.store import Manifest, open_run, write_manifest, write_part
from tests.answers import SHAPES, misfits
from tests.commands import dpro, refused
from tests.jobs import PATIENCE_S, TRAIN, TWO_RANKS, environment, head_start
from tests.traces import annotation, cpu_op, kernel, launch, write

pytestmark = pytest.mark.usefixtures("searched_once")

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
ROOT = Path(__file__).parents[2]
COMMANDS = ("info", "report", "replay", "whatif", "diagnose")
GRAPH_COMMANDS = ("replay", "whatif", "diagnose")


@functools.cache
def answer(command: str, run: Path) -> subprocess.CompletedProcess[str]:
    """The command with `--json`, run once however many tests look at what it says."""
    return dpro(command, run, "--json")


def one_object(done: subprocess.CompletedProcess[str], exit_code: int = 0) -> dict[str, Any]:
    """The one JSON object on stdout, with nothing before or behind it."""
    assert done.returncode == exit_code, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def here(monkeypatch, capsys):
    """The command line in this process, for the many ways to use it wrongly."""

    def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = ["dpro", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(command, int(ended.value.code or 0), said.out, said.err)

    return call


BEGINNINGS = (0, 1000, 2130, 3070, 4290, 5240, 6400)  # us, as uneven as real steps are


def write_traces(folder: Path) -> Path:
    """Two GPU ranks, six steps of about 1 ms; rank 1 launches its kernel 0.2 ms late."""
    for rank in range(2):
        late = 200 * rank
        events = []
        for step, (at, end) in enumerate(itertools.pairwise(BEGINNINGS)):
            number = 10 * step
            events += [
                annotation(f"ProfilerStep#{step}", at, end - at),
                cpu_op("aten::mm", at + 10 + late, 60),
                launch(at + 20 + late, 5, number + 1),
                kernel("sgemm_128x64_nn", at + 30 + late, 100, number + 1),
                cpu_op("c10d::allreduce_", at + 80 + late, 30),
                launch(at + 90 + late, 5, number + 2),
                kernel(ALL_REDUCE, at + 140 + late, 350 - late, number + 2, stream=20),
                launch(at + 400, 95, number + 3, name="cudaDeviceSynchronize"),
            ]
        facts = {"rank": rank, "world_size": 2, "backend": "nccl"}
        write(folder / f"rank{rank}.json.gz", events, distributedInfo=facts, host_name="node0")
    return folder


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    done = dpro("import", write_traces(folder / "traces"), "-o", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short real job of two ranks on CPUs."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("recorded")
    run = folder / "run"
    job = [*TWO_RANKS, head_start(folder, TRAIN), "--steps", "14"]
    record = [sys.executable, "-m", "dpro", "record", "-o", str(run), "--every", "50", "--window-steps", "3"]
    done = subprocess.run(
        [*record, "--", *job], env=environment(), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert dpro("info", run).returncode == 0  # it waits until all is written; the end of the job does not
    return run


@pytest.fixture
def without_spans(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    step = {"rank": 0, "step": 1, "start_ns": 0, "duration_ns": 1_000_000}
    write_part(run, STEPS, "rank00000", pl.DataFrame([step]))
    write_manifest(run, Manifest(world_size=1, ranks=[0]))
    return run


@pytest.fixture
def damaged(imported: Path, tmp_path: Path) -> Path:
    """A run one of whose Parquet parts was cut off."""
    run = tmp_path / "run"
    shutil.copytree(imported, run)
    part = sorted((run / SPANS.name).glob("*.parquet"))[0]
    part.write_bytes(part.read_bytes()[:-100])
    return run


@pytest.mark.few(4)
@pytest.mark.parametrize("source", ["imported", "recorded"])
@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_object_with_what_programs_rely_on(command, source, request):
    found = one_object(answer(command, request.getfixturevalue(source)))
    assert found["schema_version"] == 2
    assert misfits(found, SHAPES[command], command) == []


@pytest.mark.parametrize("source", ["imported", "recorded"])
@pytest.mark.parametrize("command", COMMANDS)
def test_text_says_something_and_is_no_traceback(command, source, request):
    done = dpro(command, request.getfixturevalue(source))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(("source", "num_steps"), [("imported", 6), ("recorded", 3)])
def test_replay_and_whatif_speak_of_the_same_steps(source, num_steps, request):
    run = request.getfixturevalue(source)
    replay, whatif = (one_object(answer(command, run)) for command in ("replay", "whatif"))
    assert len(replay["steps"]) == num_steps
    assert replay["critical_path"]
    usual_steps = analyse(str(run)).usual_steps  # on a busy machine a step may take twice as long
    usual = pl.DataFrame(replay["steps"]).filter(is_in_ranges("step", usual_steps))
    assert whatif["measured_ms"] == pytest.approx(usual["replayed_ms"].mean(), rel=0.02)
    assert whatif["baseline_ms"] <= whatif["measured_ms"] * 1.02


def test_each_heading_of_predictions_is_there_once(request):
    # Recorded on the CPU, with bounds that gain for certain and bounds that may gain nothing.
    printed = dpro("whatif", request.getfixturevalue("recorded")).stdout.splitlines()
    headings = [line for line in printed if line in {f"{each}:" for each in HEADINGS.values()}]
    assert headings
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("source", ["imported", "recorded"])
def test_predictions_come_surest_first_with_the_interval_around_them(source, request):
    predictions = one_object(answer("whatif", request.getfixturevalue(source)))["predictions"]
    places = [
        (each["block"] == "bound", each["effect"] != "faster", bool(each["training"])) for each in predictions
    ]
    assert places
    assert places == sorted(places)
    for prediction in predictions:
        assert prediction["low"] <= prediction["predicted_ms"] <= prediction["high"]
        assert prediction["gain_low_ms"] <= prediction["gain_ms"] <= prediction["gain_high_ms"]
        assert prediction["speedup_low"] <= prediction["speedup"]


@pytest.mark.parametrize("source", ["imported", "recorded"])
def test_every_edit_that_the_search_proposes_predicts_the_same_when_asked_for(source, request):
    run = request.getfixturevalue(source)
    for prediction in one_object(answer("whatif", run))["predictions"]:
        edits = [parse_edit(text) for text in prediction["edits"]]
        (again,) = what_if(analyse(str(run)), edits).document.predictions
        assert again.predicted_ms == pytest.approx(prediction["predicted_ms"], rel=1e-9)


def test_edits_given_together_are_predicted_together(imported):
    found = one_object(dpro("whatif", imported, "-e", "heal:rank=1", "-e", "no-comm", "--json"))
    (prediction,) = found["predictions"]
    assert prediction["edits"] == ["heal:rank=1", "no-comm"]
    assert prediction["speedup"] == pytest.approx(found["baseline_ms"] / prediction["predicted_ms"])


def test_an_edit_that_the_run_cannot_answer_is_refused_with_the_reason(imported):
    found = one_object(dpro("whatif", imported, "--edit", "heal:rank=9", "--json"), exit_code=1)
    assert found["predictions"] == []
    reason = "rank 9 is not in the run, which has ranks 0, 1"
    assert found["refused"] == [{"edit": "heal:rank=9", "reason": reason}]


def test_search_keeps_to_its_budget_and_curves_say_what_is_doubtful(imported, here):
    found = one_object(here("whatif", imported, "--budget", "2", "--json"))
    assert len(found["predictions"]) <= 2
    assert found["untried"]
    assert "not tried, since the budget was used up: " in here("whatif", imported, "--budget", "2").stdout
    whole, curves = (
        one_object(here("whatif", imported, *more, "--json")) for more in ([], ["--sensitivity"])
    )
    assert whole == one_object(here("whatif", imported, "--json"))
    for key in ("answerable", "reasons", "assumed"):
        assert curves[key] == whole[key]
    for more in (["--sensitivity"], ["-e", "no-comm"]):
        assert "--budget limits the search" in refused(here("whatif", imported, "--budget", "2", *more), 2)


def test_all_edits_are_listed_without_a_run():
    done = dpro("whatif", "--list")
    assert done.returncode == 0
    assert "heal:rank=1" in done.stdout


def test_a_misspelt_edit_is_bad_usage_and_one_line_names_the_nearest(imported):
    line = refused(dpro("whatif", imported, "--edit", "heel:rank=1"), exit_code=2)
    assert "did you mean 'heal'?" in line


@pytest.mark.parametrize(
    ("edit", "nearest"),
    [
        ("hide-imput", "'hide-input'"),
        ("heal:rnk=1", "'rank'"),
        ("scale:nam=x", "'name'"),
        ("network:bandwith=2", "'bandwidth'"),
    ],
)
def test_the_nearest_edit_or_key_is_named(edit, nearest, imported, here):
    assert f"did you mean {nearest}?" in refused(here("whatif", imported, "--edit", edit), exit_code=2)


@pytest.mark.parametrize(
    "edit",
    [
        "",
        "heal",
        "heal:rank=",
        "heal:rank=one",
        "scale:factor=x",
        "scale:factor=-1",
        "scale:factor=nan",
        "scale:factor=inf",
        "scale:factor=1e300",
        "scale:kind=gpu",
        "network:bandwidth=0",
        "network:bandwidth=nan",
    ],
)
def test_an_edit_without_a_sensible_value_is_bad_usage_in_one_line(edit, imported, here):
    refused(here("whatif", imported, "--edit", edit, "--json"), exit_code=2)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_does_not_exist_is_one_line(command, tmp_path, here):
    for option in ([], ["--json"]):
        line = refused(here(command, tmp_path / "nowhere", *option), exit_code=1)
        assert "nowhere: no such file or folder" in line


def test_an_error_in_a_process_of_its_own_is_one_line_too(tmp_path):
    refused(dpro("diagnose", tmp_path / "nowhere", "--json"), exit_code=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_traces_is_one_line(command, tmp_path, here, monkeypatch):
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "folder").mkdir()
    refused(here(command, tmp_path / "folder"), exit_code=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_argument_is_bad_usage(command, here):
    done = here(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "RUN" in done.stderr


def test_a_folder_of_traces_is_imported_on_the_fly_and_once(imported, tmp_path):
    folder = write_traces(tmp_path / "traces")
    before = sorted(folder.iterdir())
    called = {"run": "", "cache": ""}
    for command in COMMANDS:
        from_traces = one_object(dpro(command, folder, "--json", cache=tmp_path / "cache"))
        assert from_traces | called == one_object(answer(command, imported)) | called
    assert sorted(folder.iterdir()) == before
    assert len(list((tmp_path / "cache" / "imports").iterdir())) == 1


@pytest.mark.parametrize("command", GRAPH_COMMANDS)
def test_a_run_without_spans_is_one_line_that_says_what_to_record(command, without_spans):
    line = refused(dpro(command, without_spans, "--json"), exit_code=1)
    assert "no spans" in line
    assert "dpro record" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_part_costs_its_rank_one_line_that_names_the_file(command, damaged):
    done = dpro(command, damaged)
    assert done.returncode == 0, done.stderr
    said = done.stdout if command == "info" else done.stderr
    (line,) = [line for line in said.splitlines() if "left out: rank 0: " in line]
    assert line.endswith("rank00000.parquet: not readable as Parquet (it is damaged or cut short)")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_whose_every_rank_is_damaged_is_one_line(command, damaged):
    for part in (damaged / SPANS.name).glob("*.parquet"):
        part.write_bytes(b"PAR1")
    line = refused(dpro(command, damaged), exit_code=1)
    assert "no rank is left, since 2 files of it cannot be read; copy the run again: " in line


@pytest.mark.parametrize("command", COMMANDS)
def test_a_manifest_that_is_none_is_one_line(command, imported, tmp_path, here):
    run = tmp_path / "run"
    shutil.copytree(imported, run)
    (run / "manifest.json").write_text('{"ranks": [0')
    assert "manifest.json: not a run manifest" in refused(here(command, run), exit_code=1)


def test_the_rank_that_launches_late_is_named_in_an_imported_run(imported):
    found = one_object(answer("diagnose", imported))
    job, rank = found["findings"]  # the GPUs of the made traces idle on all ranks, too
    assert (job["class"], job["component"]) == ("slow.host", {"kind": "job", "id": "the host"})
    assert rank["component"] == {"kind": "rank", "id": "1"}
    # Its all-reduces would end 0.2 ms earlier, but the hosts ask for the device only 0.09 ms before they do.
    assert rank["cost_ms_per_step"] == pytest.approx(0.09, rel=0.1)
    assert found["healthy"] is False


def test_a_run_too_short_to_compare_its_ranks_is_not_called_healthy(imported, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(imported, run)
    for part in (run / STEPS.name).glob("*.parquet"):
        pl.read_parquet(part).filter(pl.col("step") == 3).write_parquet(part)
    found = one_object(dpro("diagnose", run, "--json"))
    assert found["findings"] == []
    assert found["healthy"] is not True


def test_a_run_with_missing_ranks_is_not_called_healthy(tmp_path):
    traces = write_traces(tmp_path / "traces")
    (traces / "rank1.json.gz").unlink()
    found = one_object(dpro("diagnose", traces, "--json", cache=tmp_path / "cache"))
    assert {finding["component"]["kind"] for finding in found["findings"]} <= {"job"}  # no rank is compared
    assert any("missing" in reason for reason in found["reasons"])
    assert found["healthy"] is not True


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_the_command_is_given(command, here):
    done = here(command, "--help")
    assert done.returncode == 0
    assert f"{command} [OPTIONS] RUN" in done.stdout
    assert "--json" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, here):
    text = here(command, "--help").stdout.partition("[OPTIONS] RUN")[2]
    assert f"dpro {command} " in text


def test_a_run_that_lost_its_steps_or_collectives_is_not_called_healthy(recorded, tmp_path):
    for lost, said in (
        (STEPS.name, "no steps are recorded"),
        (COLLECTIVES.name, "no collective was matched"),
    ):
        run = tmp_path / lost
        shutil.copytree(recorded, run)
        shutil.rmtree(run / lost)
        found = one_object(dpro("diagnose", run, "--json"))
        assert found["healthy"] is False
        assert any(said in reason for reason in found["reasons"])
    explained = one_object(dpro("explain", run, "--json"))
    assert said in explained["unsure"][0]
    assert not explained["fault"].startswith("no slow")  # on a busy machine, ranks wait for cores
    assert dpro("diagnose", run).stdout.count(said) == 1


def test_a_rank_whose_spans_are_gone_is_named(recorded, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    for part in (run / SPANS.name).glob("*rank00001*"):
        part.unlink()
    for command, key in (("replay", "reasons"), ("explain", "unsure")):
        lines = one_object(dpro(command, run, "--json"))[key]
        assert "no spans of rank 1: left out of the replay" in lines


def test_a_rank_that_was_killed_is_said_to_be(recorded, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(recorded, run)
    ended = open_run(run).table(WORKERS)["ended_ns"].max()  # of all at once: none of them is the first cause
    for part in (run / WORKERS.name).glob("*.parquet"):
        workers = pl.read_parquet(part)
        killed = {"exit_signal": pl.lit(9, pl.Int32), "ended_ns": pl.lit(ended, pl.Int64)}
        workers.with_columns(**killed).write_parquet(part)
    found = one_object(dpro("diagnose", run, "--json"))
    assert "rank 1 was ended by signal 9" in found["reasons"]
    assert found["healthy"] is False


@pytest.mark.slow
def test_every_predicted_edit_is_printed_whole(recorded, here):
    text = here("whatif", recorded, "--all").stdout
    predictions = one_object(here("whatif", recorded, "--json"))["predictions"]
    worth = [prediction for prediction in predictions if prediction["speedup"] >= WORTH_SHOWING][:ROWS]
    assert worth
    for edit in (edit for prediction in worth for edit in prediction["edits"]):
        assert f"--edit '{edit}'" in text


def test_replay_speaks_of_one_step_or_window_where_it_is_asked_to(imported, here):
    whole = one_object(here("replay", imported, "--json"))
    numbers = [row["step"] for row in whole["steps"]]
    one = one_object(here("replay", imported, "--step", numbers[1], "--json"))
    assert one["steps"] == [whole["steps"][1]]
    assert one["error_pct"] == abs(whole["steps"][1]["error_pct"])
    decided = sum(row["ms"] for row in one["critical_path"])
    # What decides is that of the job as it runs, the replayed step that of the job as it was recorded.
    assert 0.6 * one["steps"][0]["replayed_ms"] < decided <= one["steps"][0]["replayed_ms"] * 1.001
    window = one_object(here("replay", imported, "--window", "0", "--json"))
    assert window["steps"] == whole["steps"]
    refused = here("replay", imported, "--step", "999")
    assert refused.returncode == 2
    assert f"there are {numbers[0]} (window 0)" in refused.stderr


@pytest.mark.parametrize(
    "output",
    [
        ["export", "--perfetto", "no/run.pftrace"],
        ["export", "--chrome", "no/run.json"],
        ["report", "--html", "no/run.html"],
        ["report", "--markdown", "no/run.md"],
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_work(output, tmp_path, here):
    command, option, file = output
    line = refused(here(command, tmp_path / "no such run", option, tmp_path / file), exit_code=2)
    assert f"{tmp_path / file}: cannot be written" in line  # and not that there is no such run


def test_an_edit_without_its_option_is_bad_usage_and_the_line_says_how(imported, here):
    line = refused(here("whatif", imported, "heal:rank=1", "no-comm"), exit_code=2)
    assert f"dpro whatif {imported} --edit heal:rank=1 --edit no-comm" in line


def test_replay_says_what_communication_costs():
    run = ROOT / "sample_traces" / "healthy"
    lines = one_object(answer("replay", run))["communication"]
    reduced = next(line for line in lines if line["op"] == "all_reduce")
    # 4 buckets, 9 steps, 2 ranks; a rank that comes after the data is there has none left to wait for.
    assert 0.9 * 72 <= reduced["transfers"] <= 72
    assert reduced["gbps"] > 0
    assert "all_reduce in 0 default_pg[0,1]:" in dpro("replay", run).stdout
