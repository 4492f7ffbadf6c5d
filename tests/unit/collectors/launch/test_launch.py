import errno
import fcntl
import io
import json
import os
import socket
from contextlib import nullcontext, redirect_stderr, suppress

import pytest
from click.testing import CliRunner

from dpro.collectors import liveness
from dpro.collectors.inside.kernel import process_identity
from dpro.collectors.launch.notices import print_run
from dpro.collectors.launch.recording import Launch, launches
from dpro.collectors.launch.start import (
    TEARDOWN,
    TIMING,
    RecordOptions,
    claim,
    job_environment,
    run_of_this_start,
)
from dpro.collectors.liveness import is_running, unseen_end_warning, wait_until_finished
from dpro.errors import InputError, UsageError

GONE = {"host": socket.gethostname(), **process_identity(os.getpid()), "pid": 2**22 - 1, "start_ticks": 5}
HERE = GONE | process_identity(os.getpid())
ELSEWHERE = GONE | {"host": "far-away", "clock": "another boot"}


@pytest.fixture
def recording(tmp_path):
    """A recording whose job, on this host, has ended."""
    recording = Launch(tmp_path, "host-1")
    recording.marker.parent.mkdir()
    recording.marker.write_text(json.dumps(GONE))
    return recording


@pytest.fixture
def alive(recording):
    """The same, while its sidecar lives."""
    with recording.marker.open() as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        yield recording


class ClosedTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def write(self, _text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")


def test_a_job_starts_where_the_terminal_is_closed_or_the_folder_is_gone(tmp_path, monkeypatch):
    with redirect_stderr(ClosedTerminal()):
        print_run(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    with redirect_stderr(terminal):
        print_run(tmp_path)
    assert terminal.getvalue() == ""
    monkeypatch.chdir(tmp_path)


def test_folder_that_does_not_exist_is_made(tmp_path):
    claim(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_launchers_that_record_now_are_joined(alive):
    (alive.run / "steps").mkdir()
    claim(alive.run)


def test_launcher_that_has_only_begun_is_joined(tmp_path):
    (tmp_path / ".recording").mkdir()
    claim(tmp_path)


def test_recording_that_was_abandoned_is_not_joined(recording):
    with pytest.raises(UsageError, match="not empty"):
        claim(recording.run)


def test_run_without_a_recording_is_finished(tmp_path):
    assert wait_until_finished(tmp_path) == []
    assert wait_until_finished(tmp_path / "nowhere") == []


def test_abandoned_recording_is_handed_back(recording):
    assert wait_until_finished(recording.run) == [recording]


def test_recording_that_ends_while_it_is_looked_for_is_over(recording, monkeypatch):
    real = os.scandir

    def late(path):
        with suppress(FileNotFoundError):
            recording.marker.parent.rename(recording.run / "gone")
        return real(path)

    monkeypatch.setattr(os, "listdir", late)
    monkeypatch.setattr(os, "scandir", late)
    assert wait_until_finished(recording.run) == []


def test_sidecar_that_takes_too_long_is_an_error(alive):
    with pytest.raises(InputError, match="still being written"):
        wait_until_finished(alive.run, timeout_s=0.1)


def test_run_whose_job_lives_cannot_be_read_yet(alive):
    alive.marker.write_text(json.dumps(HERE))
    (alive.raw / f"host-{os.getpid()}").mkdir(parents=True)
    (alive.raw / f"host-{os.getpid()}" / "facts.json").touch()
    so_far = rf"still being recorded \(since [\d:]+, pid {os.getpid()}, 1 rank so far\)"
    with pytest.raises(InputError, match=so_far):
        wait_until_finished(alive.run, timeout_s=0.1)


def test_recording_of_another_host_is_said_to_be_there(alive):
    alive.marker.write_text(json.dumps(ELSEWHERE))
    with pytest.raises(InputError, match="still being recorded or finished on far-away"):
        wait_until_finished(alive.run, timeout_s=0.1)


@pytest.mark.parametrize("launched", [GONE, HERE])
def test_run_whose_sidecar_was_killed_is_left_to_its_job_while_a_process_of_it_lives(
    recording, monkeypatch, launched
):
    monkeypatch.setattr(liveness, "ORPHANS_S", 0.1)
    recording.marker.write_text(json.dumps(launched))
    facts = {"rank": 0, "started_ns": 1} | HERE
    (recording.raw / "host-7").mkdir(parents=True)
    (recording.raw / "host-7" / "facts.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=r"still being recorded .*; read it when the job has ended"):
        wait_until_finished(recording.run)
    assert is_running(recording)
    recording.marker.write_text(json.dumps(GONE))
    (recording.raw / "host-7" / "facts.json").write_text(json.dumps(facts | GONE))
    assert not is_running(recording)
    assert wait_until_finished(recording.run) == [recording]
    assert unseen_end_warning(recording) == []


def test_run_whose_processes_cannot_be_seen_is_over_when_it_has_not_changed_for_long(recording):
    recording.marker.write_text(json.dumps(ELSEWHERE))
    (recording.raw / "host-7").mkdir(parents=True)
    changing = recording.raw / "host-7" / "records.bin"
    changing.touch()
    with pytest.raises(InputError, match=r"may still be recorded on far-away: it changed \d s ago"):
        wait_until_finished(recording.run)
    for path in (recording.marker, changing, changing.parent):
        os.utime(path, (0, 86400))
    assert wait_until_finished(recording.run) == [recording]
    assert "their work after 1970-01-02 00:00:00 UTC is missing" in unseen_end_warning(recording)[0]


def test_removing_a_recording_leaves_nothing_and_spares_the_others(recording):
    other = Launch(recording.run, "host-2")
    other.marker.write_text("{}")
    recording.raw.mkdir(parents=True)
    recording.remove_raw()
    recording.remove_marker()
    assert launches(recording.run) == [other]
    other.remove_marker()
    assert list(recording.run.iterdir()) == []


@pytest.mark.parametrize(
    ("job", "step", "tasks", "joins"),
    [("7", "0", 2, 1), ("7", "0", 1, 0), ("7", "1", 2, 0), ("8", "0", 2, 0), ("", "", 2, 0)],
)
def test_launcher_joins_a_finished_run_of_its_own_slurm_step_only(
    tmp_path, monkeypatch, job, step, tasks, joins
):
    environment = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    (tmp_path / "manifest.json").write_text(json.dumps({"environment": environment if job else {}}))
    for name, value in (("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step), ("SLURM_STEP_NUM_TASKS", tasks)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    with nullcontext() if joins else pytest.raises(UsageError, match="not empty"):
        claim(tmp_path)


@pytest.mark.parametrize(
    ("job", "start", "name"),
    [("7", "1", "run-restart1"), ("7", "2", "run-restart2"), ("7", "0", "run"), ("7", "", "run"),
     ("8", "1", "run"), ("7", "../x", "run")],
)  # fmt: skip
@pytest.mark.parametrize("ended", [True, False])
def test_a_job_that_slurm_starts_again_is_recorded_beside_its_earlier_start(
    tmp_path, monkeypatch, job, start, name, ended
):
    run = tmp_path / "run"
    (run / ".recording").mkdir(parents=True)
    if ended:
        (run / "manifest.json").write_text(json.dumps({"environment": {"SLURM_JOB_ID": "7"}}))
    else:
        other = Launch(run, "host-1")
        other.marker.write_text(json.dumps(HERE | {"job": {"ids": {"SLURM_JOB_ID": "7"}}}))
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", start)
    assert run_of_this_start(run) == tmp_path / name
    assert run_of_this_start(tmp_path / "elsewhere") == tmp_path / "elsewhere"


def test_nccl_times_collectives_only_where_asked_to(tmp_path, monkeypatch):
    monkeypatch.delenv(TIMING, raising=False)
    launch = Launch(tmp_path, "host-1")
    assert TIMING not in job_environment(launch, RecordOptions())
    assert job_environment(launch, RecordOptions(nccl_timing=True))[TIMING] == "1"


def test_variable_that_detaches_cupti_is_set_only_where_asked_to(tmp_path, monkeypatch):
    monkeypatch.delenv(TEARDOWN, raising=False)
    launch = Launch(tmp_path, "host-1")
    assert TEARDOWN not in job_environment(launch, RecordOptions())
    assert job_environment(launch, RecordOptions(detach=True))[TEARDOWN] == "0"


@pytest.mark.parametrize("mine", ["0", "1"])
def test_detaching_is_refused_where_the_user_has_set_the_variable(monkeypatch, mine):
    from dpro.cli.record import record

    monkeypatch.setenv(TEARDOWN, mine)
    done = CliRunner().invoke(record, ["--detach", "--", "true"])
    assert isinstance(done.exception, UsageError)
    assert "unset it" in str(done.exception)


@pytest.mark.parametrize(("queues", "lines"), [("1", 1), ("8", 0)])
def test_timing_beside_a_single_queue_is_warned_of(tmp_path, monkeypatch, queues, lines):
    from dpro.cli.record import record

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    monkeypatch.setattr("dpro.collectors.launch.start.launch", lambda *_: None)
    for option, expected in (["--nccl-timing"], lines), ([], 0):
        said = CliRunner().invoke(record, [*option, "--", "true"]).stderr
        assert len(said.splitlines()) == expected
        assert "will not overlap" in said or not expected
