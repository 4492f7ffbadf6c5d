"""NCCL's Inspector: what turns it on, and what becomes of its logs."""

from dataclasses import dataclass, field
from pathlib import Path

import polars as pl
import pytest

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside import records
from dpro.collectors.launch.recording import Launch
from dpro.errors import InputError, UsageError
from dpro.extensions.nccl.plugin import INSPECTOR_LOGS, check_plugin, inspector_variables
from dpro.extensions.nccl.recorded import NOTHING, convert_logs
from dpro.schema import COLLECTIVES
from dpro.store import Run
from tests.recorder_output import FlushedWriter


def test_the_plugin_is_a_file_or_a_name_that_nccl_knows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("libmine.so").touch()
    assert check_plugin("./libmine.so", {}) == str(tmp_path / "libmine.so")
    assert check_plugin("libmine.so", {}) == str(tmp_path / "libmine.so")
    assert check_plugin("inspector", {}) == "inspector"
    with pytest.raises(UsageError, match="no such file"):
        check_plugin("/nowhere/libmine.so", {})


@pytest.mark.parametrize("name", ["NCCL_PROFILER_PLUGIN", "NCCL_INSPECTOR_DUMP_DIR"])
def test_a_plugin_or_folder_of_the_users_own_is_not_overridden(name):
    with pytest.raises(UsageError, match=f"{name} is set already"):
        check_plugin("inspector", {name: "theirs"})


def test_how_much_is_written_is_the_users_say():
    given = inspector_variables("inspector", Path("/logs"), {"NCCL_INSPECTOR_DUMP_VERBOSE": "0"})
    assert "NCCL_INSPECTOR_DUMP_VERBOSE" not in given
    assert given["NCCL_PROFILER_PLUGIN"] == "inspector"
    assert given["NCCL_INSPECTOR_DUMP_DIR"] == "/logs"


# Logs, through a reader that returns made-up traces.


@dataclass
class Trace:
    frames: dict[str, pl.DataFrame]
    versions: dict[str, str] = field(default_factory=lambda: {"format": "v4.0"})
    skipped: dict[str, int] = field(default_factory=lambda: {"malformed lines": 1})
    warnings: list[str] = field(default_factory=list)


def read(path: Path) -> list[Trace]:
    if path.read_text() == "damaged":
        raise InputError(f"{path}: damaged")
    pid, *starts_ns = map(int, path.read_text().split())
    rows = pl.DataFrame({"collective_id": range(len(starts_ns)), "start_ns": starts_ns, "duration_ns": 5})
    return [Trace({"workers": pl.DataFrame({"host": ["node1"], "pid": [pid]}), "collectives": rows})]


@pytest.fixture
def launch(tmp_path):
    launch = Launch(tmp_path, "a")
    (launch.raw / INSPECTOR_LOGS).mkdir(parents=True)
    return launch


def process(launch: Launch, rank: int, pid: int) -> RecordedProcess:
    folder = launch.raw / f"node1-{pid}"
    folder.mkdir()
    writer = FlushedWriter(folder / "records.bin")
    writer.write(records.WINDOW, 0, 1000, 2000)
    return RecordedProcess(folder, {"rank": rank, "host": "node1", "pid": pid})


def test_rows_are_those_of_the_processes_rank_outside_deep_windows(launch):
    processes = [process(launch, 3, 70), process(launch, 4, 71)]
    (launch.raw / INSPECTOR_LOGS / "one.log").write_text("70 500 1500 2500")
    (launch.raw / INSPECTOR_LOGS / "two.log").write_text("71 600")
    (launch.raw / INSPECTOR_LOGS / "other.log").write_text("99 600 700")
    for _ in range(2):  # as after a crash
        note = convert_logs(launch, processes, read)
    rows = Run(launch.run, None).table(COLLECTIVES)
    assert rows.select("rank", "window", "start_ns", "duration_ns").rows() == [
        (3, -1, 500, 5),
        (3, -1, 2500, 5),
        (4, -1, 600, 5),
    ]
    assert rows["collective_id"].min() >= 1 << 61
    assert note["warnings"] == []
    assert note["versions"] == {"format": "v4.0"}
    assert {"collectives of NCCL's Inspector in processes without a rank": 2} in note["skipped"]


def test_a_log_that_cannot_be_read_is_a_warning(launch):
    (launch.raw / INSPECTOR_LOGS / "one.log").write_text("damaged")
    assert convert_logs(launch, [], read)["warnings"] == ["a log of NCCL's Inspector was skipped: damaged"]


def test_an_inspector_that_wrote_nothing_is_a_warning_only_where_it_was_asked_for(launch):
    assert convert_logs(launch, [], read)["warnings"] == [NOTHING]
    (launch.raw / INSPECTOR_LOGS).rmdir()
    assert convert_logs(launch, [], read) == {}
