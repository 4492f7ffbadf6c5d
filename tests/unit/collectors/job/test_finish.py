"""From the recorder's files to a run, with readers that return made-up traces."""

import errno
import json
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from dpro.analysis.summary import run_info
from dpro.collectors import sidecar
from dpro.collectors.convert import windows
from dpro.collectors.convert.recorded import Readers
from dpro.collectors.finish import convert_waiting, finish
from dpro.collectors.inside import records
from dpro.collectors.inside.kernel import process_identity
from dpro.collectors.launch.notices import LastWord
from dpro.collectors.launch.recording import Launch
from dpro.collectors.telemetry.samples import SampleWriter, TelemetrySample
from dpro.detect.hang.memory import HOST_KILL
from dpro.errors import InputError
from dpro.opening import ensure_finished
from dpro.schema import COLLECTIVES, COUNTERS, REQUESTS, SPANS, STEPS, WORKERS
from dpro.store import is_run, open_run
from tests.commands import dpro
from tests.recorder_output import FlushedWriter


@dataclass
class Trace:
    frames: dict[str, pl.DataFrame]
    versions: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_trace(path: Path, *, rank: int | None = None, window: int = 0) -> Trace:
    if path.read_text() == "damaged":
        raise InputError(f"{path}: damaged")
    rows = {
        "span_id": [0, 1],
        "rank": [rank] * 2,
        "window": [window] * 2,
        "start_ns": [1, 2],
        "duration_ns": [1, 1],
    }
    return Trace({"spans": pl.DataFrame(rows)}, skipped={"flow": 3})


def read_dump(path: Path, *, rank: int | None = None) -> Trace:
    return Trace({"collectives": COLLECTIVES.empty()})


OPTIONS = {"skip": 5, "window_steps": 2, "every": 200}


READERS = Readers(trace=read_trace, dump=read_dump)


@pytest.fixture
def launch(tmp_path):
    return launched(tmp_path, "host-1")


def launched(run: Path, name: str) -> Launch:
    launch = Launch(run, name)
    launch.raw.mkdir(parents=True)
    launch.marker.parent.mkdir(exist_ok=True)
    launch.marker.write_text(
        json.dumps(
            {"host": "elsewhere", "pid": 1, "start_ticks": 1, "command": ["train"], "options": OPTIONS}
        )
    )
    return launch


def recorded(
    launch: Launch,
    rank: int = 0,
    pid: int = 7,
    world_size: int = 1,
    steps: int = 6,
    windows: int = 0,
    attempt: int = 0,
    **of_actor: str,
) -> Path:
    folder = launch.raw / f"host-{pid}"
    folder.mkdir()
    facts = {"rank": rank, "world_size": world_size, "local_rank": rank, "host": "host", "pid": pid}
    facts |= {
        "started_ns": 1000 * attempt + pid,
        "attempt": str(attempt),
        "gpu_name": "",
        "gpu_uuid": "",
        "versions": {"torch": "2.13"},
    }
    facts |= of_actor
    (folder / "facts.json").write_text(json.dumps(facts))
    writer = FlushedWriter(folder / "records.bin")
    for step in range(1, steps + 1):
        writer.write(records.UPDATE, 0, step, 100 * step, 100 * step + 10)
    for window in range(windows):
        (folder / f"window{window:04d}.json").write_text("whole")
    return folder


@pytest.mark.parametrize(("name", "lost"), [("window0003.json.tmp", "window0003"), ("calls-fr.json.tmp", "")])
def test_what_was_being_written_is_named_unless_it_was_only_for_a_watcher(launch, name, lost):
    (recorded(launch) / name).write_text("half")
    finish(launch, READERS, 0, {7: 0})
    warnings = open_run(launch.run).manifest.warnings
    assert [each.rpartition(": ")[2] for each in warnings if "incomplete, since" in each] == [lost] * bool(
        lost
    )


STOP = records.Record(263, 540, 3140, 270_000, records.STOPPED)
RESUME = records.Record(54_013, 540, 54_000, 265_000, records.RESUMED)
AGAIN = records.Record(60_001, 900, 60_000, 381_000, records.STOPPED)
STOPPED = "automatic deep windows stopped at step 263, having cost 17.2% of the time"
STOPPED_AGAIN = (
    "automatic deep windows stopped 2 times, the last time at step 60,001, having cost 1.5% of the time"
)
DETACHED = [
    records.Record(step, took_ns, late, 0, records.DETACHED)
    for step, took_ns, late in ((90, 1_400_000, 0), (300, 3_060_000, 0))
]
LATE = records.Record(510, 101_000_000, 1, 0, records.DETACHED)
MEANWHILE = "steps took 26% longer for a while than before the first one"
REQUEST = "`dpro attach RUN --steps 3` records one on request"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], []),
        ([STOP], [f"{STOPPED}: steps take 27% longer than before the first one; {REQUEST}"]),
        ([STOP, RESUME], [f"{STOPPED}, and resumed at step 54,013: {MEANWHILE}"]),
        (
            [STOP, RESUME, AGAIN],
            [f"{STOPPED_AGAIN}: steps take 38% longer than before the first one; {REQUEST}"],
        ),
        (DETACHED, ["CUPTI was detached 2 times (--detach), in at most 3.1 ms"]),
        (
            [*DETACHED, LATE],
            [
                "CUPTI was detached 3 times (--detach), in at most 101.0 ms; at step 510 not in time: "
                "no deep window follows"
            ],
        ),
    ],
)
def test_what_became_of_windows_and_cupti_is_one_line_that_info_shows(launch, changes, said):
    with (recorded(launch) / "records.bin").open("ab") as file:
        file.write(b"".join(map(records.packed, changes)))
    finish(launch, READERS, 0, {7: 0})
    run = open_run(launch.run)
    assert run.manifest.warnings == said
    assert [value for name, value in run_info(run.manifest, run.table(STEPS)) if name == "warning"] == said
    lines = dpro("info", launch.run).stdout.splitlines()
    assert [line for line in lines if line.startswith("warning")] == [f"warning    {line}" for line in said]


def test_steps_run_from_boundary_to_boundary_without_our_own_work(launch):
    recorded(launch, steps=3)
    finish(launch, READERS, 0, {7: 0})
    run = open_run(launch.run)
    assert run.table(STEPS).select("step", "start_ns", "duration_ns").rows() == [(1, 110, 90), (2, 210, 90)]
    assert run.manifest.exit_status == 0
    assert run.table(WORKERS)["exit_code"].to_list() == [0]
    assert not launch.marker.exists()
    assert not launch.raw.exists()


def test_signals_and_unknown_ends_of_ranks_are_distinguished(launch):
    recorded(launch, rank=0, pid=7, world_size=2)
    recorded(launch, rank=1, pid=8, world_size=2)
    finish(launch, READERS, None, {7: signal.SIGKILL})
    run = open_run(launch.run)
    assert run.table(WORKERS).select("exit_code", "exit_signal").rows() == [(-1, signal.SIGKILL), (-1, -1)]
    assert run.manifest.exit_status is None


def of_group(launch: Launch, name: str, first_pid: int, steps: int, attempt: int = 0) -> None:
    """Two actors of Ray; the second is in a call."""
    for rank, pid in enumerate((first_pid, first_pid + 1)):
        facts = {"actor": f"{pid}", "actor_name": f"{name}-{rank}", "actor_class": "Worker"}
        recorded(launch, rank, pid, world_size=2, steps=steps, attempt=attempt, **facts)
        (launch.raw / f"actor-host-{pid}.busy").write_text(str(rank))


def test_each_worker_group_is_a_run_and_that_which_trains_most_is_the_jobs(launch):
    of_group(launch, "trainer", 10, steps=6)
    of_group(launch, "rollout", 20, steps=0)
    of_group(launch, "rollout", 30, steps=2, attempt=1)
    convert_waiting(launch, READERS)
    finish(launch, READERS, 0, {})
    runs = {
        place: open_run(launch.run / place) for place in ("", "groups/rollout", "groups/rollout/attempts/0")
    }
    pids = {place: run.table(WORKERS)["pid"].to_list() for place, run in runs.items()}
    assert pids == {"": [10, 11], "groups/rollout": [30, 31], "groups/rollout/attempts/0": [20, 21]}
    assert [run.table(WORKERS)["role"].unique().to_list() for run in runs.values()] == [
        ["trainer"], ["rollout"], ["rollout"]
    ]  # fmt: skip
    assert runs[""].manifest.warnings[0] == (
        "the job has 2 worker groups: this one trains most, the others are in groups/"
    )
    assert "the group began 2 times: this is the last run, earlier ones are in attempts/" in (
        runs["groups/rollout"].manifest.warnings
    )
    assert "role       trainer\n" in dpro("info", launch.run).stdout
    assert not launch.raw.exists()


@pytest.mark.parametrize(
    ("job", "expected"),
    [(0, [(0, -1), (0, -1)]), (256, [(0, -1), (-1, signal.SIGKILL)])],
)
def test_actors_that_ray_ends_have_not_failed_unless_in_a_call_of_a_failed_job(launch, job, expected):
    of_group(launch, "trainer", 10, steps=2)
    finish(launch, READERS, job, {10: 256, 11: signal.SIGKILL})
    assert open_run(launch.run).table(WORKERS).select("exit_code", "exit_signal").rows() == expected


def test_processes_on_other_hosts_are_waited_for_until_they_write_no_more(launch, monkeypatch):
    folder = recorded(launch)
    looks = []

    def sleep(_: float) -> None:
        looks.append(0)
        if len(looks) < 3:
            with (folder / "records.bin").open("ab") as file:
                file.write(b"more")

    monkeypatch.setattr(sidecar, "time", SimpleNamespace(sleep=sleep))
    sidecar._wait_for_other_hosts(launch)
    assert len(looks) == 3
    looks.clear()
    monkeypatch.setattr(sidecar.socket, "gethostname", lambda: "host")
    sidecar._wait_for_other_hosts(launch)
    assert looks == []


def test_kills_for_lack_of_memory_are_said_as_the_diagnosis_reads_them(launch, monkeypatch):
    recorded(launch)
    counts = iter((3, 5))
    monkeypatch.setattr(sidecar, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(sidecar, "start_sampler", lambda _: None)
    monkeypatch.setattr(sidecar, "ELSEWHERE_S", 0)
    job = SimpleNamespace(ended=lambda: True, status=0)
    sidecar.attend(
        launch,
        job,
        lambda _: None,
        lambda ended, *how: finish(ended, READERS, *how),
        LastWord(launch.run, quiet=True),
    )
    [warning] = open_run(launch.run).manifest.warnings
    assert "killed 2 process(es) for lack of memory" in warning
    assert HOST_KILL.search(warning)
    assert HOST_KILL.search("host: for lack of memory the kernel killed 2 process(es), of the job")  # older


def test_conversion_that_was_interrupted_gives_each_row_once(launch, monkeypatch):
    folder = recorded(launch, windows=3)
    whole = windows.convert_batch

    def interrupted(*arguments: object) -> None:
        whole(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(windows, "convert_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert_waiting(launch, READERS)
    monkeypatch.setattr(windows, "convert_batch", whole)
    (folder / "window0003.json").write_text("whole")
    convert_waiting(launch, READERS)
    (folder / "window0004.json").write_text("whole")
    finish(launch, READERS, 0, {})
    run = open_run(launch.run)
    spans = run.table(SPANS)
    assert spans["window"].to_list() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert spans["span_id"].is_unique().all()
    assert run.manifest.skipped == {"flow": 15}


def test_damaged_window_is_a_warning_and_the_others_are_kept(launch):
    folder = recorded(launch, windows=3)
    (folder / "window0001.json").write_text("damaged")
    finish(launch, READERS, 0, {})
    run = open_run(launch.run)
    assert set(run.table(SPANS)["window"]) == {0, 2}
    assert "window 1 is lost" in run.manifest.warnings[0]


def test_what_cannot_be_converted_stays_and_the_rest_is_a_run(launch, monkeypatch):
    recorded(launch, windows=1)

    def broken(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(windows, "convert_batch", broken)
    finish(launch, READERS, 0, {})
    run = open_run(launch.run)
    assert run.table(STEPS).height == 5
    assert "not all of .raw was converted: ValueError: a defect" in run.manifest.warnings[0]
    assert list(launch.raw.glob("*/*/window0000.json"))
    assert not launch.marker.exists()


def test_rank_that_could_not_be_converted_is_not_taken_for_one_without_steps(launch, monkeypatch):
    recorded(launch)
    monkeypatch.setattr("dpro.collectors.finish.convert_process", lambda *_: 1 / 0)
    finish(launch, READERS, 1 << 8, {})
    assert open_run(launch.run).manifest.unrecorded.startswith("rank 0: not all of .raw was converted: Zero")


def test_restarted_job_is_a_run_of_its_last_attempt_with_the_others_beside_it(launch):
    for attempt, steps in enumerate((20, 30, 4)):
        for rank in (0, 1):
            pid = 10 * attempt + rank
            recorded(launch, rank, pid, world_size=2, steps=steps, windows=2 - attempt, attempt=attempt)
        convert_waiting(launch, READERS)
    finish(launch, READERS, 0, {0: 5 << 8, 1: signal.SIGKILL})
    run = open_run(launch.run)
    assert run.table(STEPS).filter(rank=1)["step"].to_list() == [1, 2, 3]
    assert run.table(SPANS).is_empty()
    assert run.manifest.warnings == [
        "the job began 3 times: this is the last run, earlier ones are in attempts/"
    ]
    first, second = (open_run(launch.run / "attempts" / number) for number in "01")
    assert first.manifest.ranks == second.manifest.ranks == [0, 1]
    assert (first.table(STEPS).height, second.table(STEPS).height) == (2 * 19, 2 * 29)
    assert (first.table(SPANS)["window"].max(), second.table(SPANS)["window"].max()) == (1, 0)
    assert first.table(WORKERS).select("exit_code", "exit_signal").rows() == [(5, -1), (-1, signal.SIGKILL)]


def test_disk_that_is_full_leaves_the_recording_to_whoever_reads_it_later(launch, monkeypatch):
    recorded(launch, windows=1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(windows, "write_part", full)
        with pytest.raises(OSError, match="No space left"):
            finish(launch, READERS, 0, {})
    assert not is_run(launch.run)
    finish(launch, READERS, None, {})
    assert open_run(launch.run).table(SPANS).height == 2


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [(0, 0, 0), (0, 3, 3), (3, 0, 3), (None, 0, None), (0, None, None), (None, 3, 3)],
)
def test_run_of_several_launchers_has_the_exit_status_of_the_first_that_failed(tmp_path, one, other, joined):
    for name, status in (("a", one), ("b", other)):
        finish(launched(tmp_path, name), READERS, None if status is None else status << 8, {})
    assert open_run(tmp_path).manifest.exit_status == joined


@pytest.mark.parametrize(("steps", "lost"), [(3, False), (200_000_000, True)])
def test_telemetry_that_ends_long_before_the_processes_is_a_warning(launch, steps, lost):
    folder = recorded(launch, steps=0)
    FlushedWriter(folder / "more.bin").write(records.UPDATE, 0, 1, 100 * steps, 100 * steps)
    (folder / "more.bin").rename(folder / "records.bin")
    writer = SampleWriter(launch.raw, "host")
    writer.append([TelemetrySample(1_000_000_000, 0, "", {"cpu": 1.0})])
    writer.close()
    finish(launch, READERS, 0, {})
    run = open_run(launch.run)
    assert run.table(COUNTERS).filter(counter="cpu").height == 1
    said = "telemetry ends at 1970-01-01 00:00:01 UTC, 19 s before the processes do: the sampler"
    assert [said in each for each in run.manifest.warnings if "telemetry" in each] == [True] * lost


def test_rank_that_two_launchers_recorded_is_a_warning(tmp_path):
    for pid, name in ((7, "a"), (8, "b")):
        other = launched(tmp_path, name)
        recorded(other, pid=pid)
        finish(other, READERS, 0, {})
    [warning] = open_run(tmp_path).manifest.warnings
    assert warning.startswith("several launchers recorded rank 0: ")


def test_missing_rank_is_named(launch):
    recorded(launch, rank=1, world_size=2)
    finish(launch, READERS, 0, {})
    assert open_run(launch.run).manifest.missing_ranks == [0]


def test_log_lines_become_warnings(launch):
    recorded(launch)
    (launch.raw / "log.txt").write_text("process 7 stopped recording\n")
    finish(launch, READERS, 3 << 8, {})
    manifest = open_run(launch.run).manifest
    assert manifest.warnings == ["process 7 stopped recording"]
    assert manifest.exit_status == 3


@pytest.mark.parametrize(
    ("steps", "errors", "status", "why"),
    [
        (4, [], 0, ""),
        (1, [], 0, "the job ran a single step: "),
        (
            0,
            [(2, "KeyError: b"), (1, "ValueError: a"), (0, "ChildFailedError: c")],
            1 << 8,
            "failed (exit code 1: ValueError: a (b.py:3)) before",
        ),
        (0, [], signal.SIGSEGV, "failed (SIGSEGV) before its first step ended"),
        (None, [], 0, "no process of the job was seen to import torch"),
    ],
)
def test_manifest_says_why_there_is_no_step_and_what_ended_the_job(launch, steps, errors, status, why):
    if steps is not None:
        recorded(launch, steps=steps)
    for time_ns, error in errors:
        kind, _, message = error.partition(": ")
        raised = {"time_ns": time_ns, "type": kind, "message": message, "calls": ["/a/b.py:3 main"]}
        (launch.raw / f"raised-host-{time_ns}.json").write_text(json.dumps(raised))
    (launch.raw / "raised-host-9.json").write_text("damaged")
    finish(launch, READERS, status, {})
    manifest = open_run(launch.run).manifest
    assert why in manifest.unrecorded
    assert bool(why) == bool(manifest.unrecorded)
    assert manifest.error == ("ValueError: a (b.py:3)" if errors else "")
    assert manifest.warnings == ([manifest.unrecorded] if why else [])


def test_launchers_of_which_one_recorded_steps_have_them_all(tmp_path):
    other = launched(tmp_path, "host-2")
    finish(other, READERS, 0, {})
    assert open_run(tmp_path).manifest.unrecorded
    first = launched(tmp_path, "host-1")
    recorded(first)
    finish(first, READERS, 0, {})
    assert open_run(tmp_path).manifest.unrecorded == ""


def test_a_log_of_requests_is_added_and_one_that_is_missing_costs_a_line(launch, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"arrival_time": 1.5, "latency": 2.0, "prompt_tokens": 7}\n')
    facts = json.loads(launch.marker.read_text())
    wanted = {"options": OPTIONS | {"requests": [str(log)]}, "launched_ns": 5}
    launch.marker.write_text(json.dumps(facts | wanted))
    finish(launch, READERS, 0, {})
    run = open_run(launch.run)
    assert run.table(REQUESTS).select("arrival_ns", "prompt_tokens", "source").rows() == [
        (1_500_000_000, 7, "log.jsonl")
    ]
    other = launched(tmp_path / "other", "host-2")
    wanted["options"]["requests"] = [str(tmp_path / "missing.jsonl")]
    other.marker.write_text(json.dumps(facts | wanted))
    finish(other, READERS, 0, {})
    (warning,) = [line for line in open_run(other.run).manifest.warnings if "missing.jsonl" in line]
    assert warning.startswith("no requests of a log were added")


def test_of_commands_that_read_one_unfinished_recording_one_finishes_it_and_the_others_wait(
    launch, monkeypatch
):
    gone = process_identity(os.getpid()) | {"start_ticks": 1}
    facts = recorded(launch) / "facts.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | gone))
    launch.marker.write_text(json.dumps(json.loads(launch.marker.read_text()) | gone))
    begun, failed = [], []

    def slowly(*arguments):
        begun.append(1)
        time.sleep(0.3)
        finish(*arguments)

    def read():
        try:
            ensure_finished(launch.run)
            assert open_run(launch.run).table(STEPS).height == 5
        except BaseException as error:
            failed.append(error)

    monkeypatch.setattr("dpro.collectors.finish.finish", slowly)
    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert failed == []
    assert begun == [1]
