"""Attacks: runs that came from elsewhere, and other users of this machine."""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest

from dpro.collectors import liveness
from dpro.collectors.attach import copy_run
from dpro.collectors.finish import finish
from dpro.collectors.inject import _dpro_autoload
from dpro.collectors.inside import records
from dpro.collectors.inside.files import is_own
from dpro.collectors.inside.recorder import Recorder
from dpro.collectors.launch.recording import COPY, Launch, ensure_mine, is_out_of_reach, launches, write_copy
from dpro.collectors.launch.start import RecordOptions, claim, job_environment, make_raw
from dpro.errors import DproError, InputError, UsageError
from dpro.extensions.serving import inside as serving
from dpro.opening import ensure_finished, open_path, readers
from dpro.schema import STEPS
from dpro.store import Manifest, open_run, write_manifest, write_part
from tests.recorder_output import FlushedWriter

STEP = pl.DataFrame({"rank": [0], "step": [1], "start_ns": [0], "duration_ns": [1]})
OTHER = 54321  # a user that is not this one


@pytest.fixture(autouse=True)
def long_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recorded process lives."""
    monkeypatch.setattr(liveness, "is_alive", lambda _: False)


@pytest.fixture
def treasure(tmp_path: Path) -> Path:
    """A folder that has nothing to do with the run, and files in it of all names that finishing knows."""
    folder = tmp_path / "treasure"
    (folder / "host-1").mkdir(parents=True)
    for name in ("control.json", "window0000.json", "flight-fr-0.json", "telemetry-00000.z", "log.txt"):
        (folder / name).write_text("of value")
        (folder / "host-1" / name).write_text("of value")
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that a launcher left, whose sidecar was killed."""
    launch = Launch(tmp_path / "run", "host-1-abc")
    folder = launch.raw / "host-7"
    folder.mkdir(parents=True)
    launch.marker.parent.mkdir()
    launch.marker.write_text(json.dumps({"host": "far", "pid": 1, "start_ticks": 1, "command": ["x"]}))
    facts = {"rank": 0, "world_size": 1, "local_rank": 0, "host": "host", "pid": 7, "started_ns": 1}
    facts |= {"attempt": "", "gpu_name": "", "gpu_uuid": "", "versions": {}}
    (folder / "facts.json").write_text(json.dumps(facts))
    writer = FlushedWriter(folder / "records.bin")
    for step in range(1, 5):
        writer.write(records.UPDATE, 0, step, 100 * step, 100 * step + 10)
    return launch.run


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def raw_is_a_link(run: Path, treasure: Path) -> None:
    (run / ".raw").rename(run.parent / "moved")
    (run / ".raw").symlink_to(treasure)


def launch_is_a_link(run: Path, treasure: Path) -> None:
    (run / ".raw" / "host-1-abc").rename(run.parent / "moved")
    (run / ".raw" / "host-1-abc").symlink_to(treasure)


def process_is_a_link(run: Path, treasure: Path) -> None:
    [facts] = (run / ".raw").glob("*/*/facts.json")
    (treasure / "facts.json").write_text(facts.read_text())
    (facts.parent.parent / "host-8").symlink_to(treasure)


def batch_is_a_link(run: Path, treasure: Path) -> None:
    [facts] = (run / ".raw").glob("*/*/facts.json")
    (facts.parent / "batch-window0000").symlink_to(treasure)


def log_is_a_link(run: Path, treasure: Path) -> None:
    (run / ".raw" / "host-1-abc" / "log.txt").symlink_to(treasure / "log.txt")


def file_is_a_pipe(run: Path, treasure: Path) -> None:
    os.mkfifo(run / ".raw" / "host-1-abc" / "host-7" / "exit")


def markers_are_a_link(run: Path, treasure: Path) -> None:
    (run / ".recording").rename(treasure / "markers")
    (run / ".recording").symlink_to(treasure / "markers")


def marker_is_a_link(run: Path, treasure: Path) -> None:
    marker = run / ".recording" / "host-1-abc.json"
    marker.rename(treasure / "marker")
    marker.symlink_to(treasure / "marker")


def marker_is_a_pipe(run: Path, treasure: Path) -> None:
    (run / ".recording" / "host-1-abc.json").unlink()
    os.mkfifo(run / ".recording" / "host-1-abc.json")


def marker_named(name: str) -> Callable[[Path, Path], None]:
    def attack(run: Path, treasure: Path) -> None:
        marker = run / ".recording" / "host-1-abc.json"
        marker.rename(marker.with_name(name))
        treasure.rename(run / "treasure")
        treasure.symlink_to(run / "treasure")

    attack.__name__ = f"marker_is_named_{name}"
    return attack


def marker_says(**facts: object) -> Callable[[Path, Path], None]:
    def attack(run: Path, treasure: Path) -> None:
        marker = run / ".recording" / "host-1-abc.json"
        marker.write_text(json.dumps(json.loads(marker.read_text()) | facts))

    attack.__name__ = f"marker_says_{next(iter(facts))}"
    return attack


def steps_are_a_link(run: Path, treasure: Path) -> None:
    (run / "steps").symlink_to(treasure)


def attempts_are_a_link(run: Path, treasure: Path) -> None:
    (run / "attempts").symlink_to(treasure)


@pytest.mark.parametrize(
    "attack",
    [
        raw_is_a_link,
        launch_is_a_link,
        process_is_a_link,
        batch_is_a_link,
        log_is_a_link,
        file_is_a_pipe,
        markers_are_a_link,
        marker_is_a_link,
        marker_is_a_pipe,
        marker_named("...json"),
        marker_named("..json"),
        marker_named(".json"),
        marker_named("a\nb.json"),
        marker_says(host="/etc"),
        marker_says(pid="1/../.."),
        marker_says(options=[]),
        marker_says(options={"apply": [1]}),
        marker_says(command="sh"),
        steps_are_a_link,
        attempts_are_a_link,
    ],
)
def test_run_that_leads_elsewhere_is_refused_in_one_line_and_nothing_is_changed(run, treasure, attack):
    attack(run, treasure)
    before, elsewhere = contents(run), contents(treasure)
    with pytest.raises(DproError) as error:
        open_path(run)
    assert "\n" not in str(error.value)
    assert (contents(run), contents(treasure)) == (before, elsewhere)


@pytest.mark.parametrize(
    ("name", "value"), [("pid", "7/../../../treasure/x"), ("rank", "0"), ("host", None), ("versions", [])]
)
def test_facts_that_no_process_writes_are_left_out_and_the_rest_is_a_run(run, treasure, name, value):
    [facts] = (run / ".raw").glob("*/*/facts.json")
    other = facts.parent.with_name("host-8") / "facts.json"
    other.parent.mkdir()
    other.write_text(json.dumps(json.loads(facts.read_text()) | {"pid": 8, "rank": 1} | {name: value}))
    elsewhere = contents(treasure)
    opened = open_path(run)
    assert opened.table(STEPS)["rank"].unique().to_list() == [0]
    assert opened.manifest.warnings == ["host-8: not all of .raw was converted: its facts.json is damaged"]
    assert contents(treasure) == elsewhere
    assert other.exists()  # what was not converted stays


def test_files_with_foreseeable_names_are_not_written_through_links(tmp_path, treasure):
    run, target = tmp_path / "run", treasure / "log.txt"
    (run / "steps").mkdir(parents=True)
    (run / f".manifest.json.{socket.gethostname()}.{os.getpid()}.tmp").symlink_to(target)
    (run / "steps" / f".rank00000.parquet.{socket.gethostname()}.{os.getpid()}.tmp").symlink_to(target)
    write_part(run, STEPS, "rank00000", STEP)
    write_manifest(run, Manifest(1, [0]))
    assert target.read_text() == "of value"
    assert open_run(run).table(STEPS).height == 1


@pytest.mark.parametrize("use", [open_run, lambda run: write_part(run, STEPS, "rank00000", STEP)])
def test_table_that_is_a_link_is_neither_read_nor_written(tmp_path, treasure, use):
    write_manifest(tmp_path / "run", Manifest(1, [0]))
    (tmp_path / "run" / "steps").symlink_to(treasure)
    before = contents(treasure)
    with pytest.raises(InputError, match="steps: is a symbolic link"):
        use(tmp_path / "run")
    assert contents(treasure) == before


def test_removing_what_was_recorded_spares_what_the_recorder_did_not_make(run, treasure):
    [launch] = launches(run)
    (run / ".raw" / "notes.json").write_text("mine")
    launch.remove_raw()
    assert contents(run / ".raw") == {"notes.json": b"mine"}
    (run / ".raw").rename(run / "gone")
    (run / ".raw").symlink_to(treasure)
    before = contents(treasure)
    with pytest.raises(InputError, match="symbolic link"):
        Launch(run, "host-1").remove_raw()
    assert contents(treasure) == before


def test_copy_of_a_recording_keeps_what_others_put_there_meanwhile(run, tmp_path, monkeypatch):
    monkeypatch.setattr("dpro.collectors.attach.training_processes", lambda _: [])
    to = tmp_path / "copy"

    def finish_late(launch: Launch) -> None:
        (to / "theirs").write_text("of value")
        finish(launch, readers(), None, {})

    copy_run(run, to, finish_late)
    assert (to / "theirs").read_text() == "of value"
    assert open_run(to).table(STEPS).height == 3
    assert sorted(path.name for path in to.iterdir() if path.name.startswith(".")) == []


# Other users.


@pytest.fixture
def as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process takes itself for another user; what it makes still belongs to this one."""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)


@pytest.mark.usefixtures("as_another")
def test_recording_of_another_user_is_not_finished(run):
    before = contents(run)
    with pytest.raises(InputError, match=rf"belongs to .*, not to user {OTHER}: only its owner"):
        ensure_finished(run)
    assert contents(run) == before


@pytest.mark.usefixtures("as_another")
def test_folder_of_another_user_is_not_recorded_into(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match="belongs to"):
        claim(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.usefixtures("as_another")
def test_process_of_the_job_takes_nothing_from_a_folder_of_another_user(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PermissionError, match="does not belong to this user"):
        Recorder(tmp_path)


def test_folder_that_others_may_write_to_is_not_ones_own(tmp_path):
    assert is_own(tmp_path)
    tmp_path.chmod(0o770)
    assert not is_own(tmp_path)
    (tmp_path / "link").symlink_to("/")
    assert not is_own(tmp_path / "link")


def test_root_records_on_a_file_server_with_root_squash(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    monkeypatch.setattr("dpro.collectors.inside.files.SQUASHED_ROOT", os.stat(run).st_uid)
    claim(run)


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022])
def test_what_is_recorded_is_closed_to_others_and_cannot_be_replaced(tmp_path, mask):
    before = os.umask(mask)
    try:
        launch = Launch(tmp_path / "run", "host-1")
        claim(launch.run)
        make_raw(launch)
    finally:
        os.umask(before)
    assert stat.S_IMODE((launch.run / ".raw").stat().st_mode) == 0o700
    assert stat.S_IMODE(launch.raw.stat().st_mode) == 0o700
    mode = launch.run.stat().st_mode
    assert not mode & 0o022 or mode & stat.S_ISVTX


def test_folder_of_a_launcher_comes_back_where_another_has_just_removed_it(tmp_path, monkeypatch):
    launch = Launch(tmp_path, "host-1")
    real, removed = Path.mkdir, []

    def late(path: Path, *arguments: object, **options: object) -> None:
        if path == launch.raw and not removed:
            removed.append(path.parent.rmdir())
        real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", late)
    make_raw(launch)
    assert launch.raw.is_dir()


def test_job_finds_code_where_dpro_is_installed_and_none_in_the_run(tmp_path):
    launch = Launch(tmp_path / "at 12:30 100%", "host-1")
    claim(launch.run)
    code, name, *_ = job_environment(launch, RecordOptions())["PYTHONPATH"].split(os.pathsep)
    assert (Path(code) / "_dpro_autoload.py").is_file()
    assert not Path(code).is_relative_to(tmp_path)
    assert not os.path.lexists(name)
    assert Path(name).parent == Path(code)  # where only those may make it who may change dpro


@pytest.fixture
def copied(tmp_path):
    launch = Launch(tmp_path / "run", "host-1")
    claim(launch.run)
    make_raw(launch)
    alone = tmp_path / "probe.py"
    alone.touch()
    write_copy(launch.raw, {"serving": serving.__file__, "sparks": str(alone)})
    return launch.raw / COPY


def test_copy_for_containers_is_behind_the_installation_and_closed_to_others(copied):
    launch = Launch(copied.parents[2], "host-1")
    code, _, copy, *_ = job_environment(launch, RecordOptions())["PYTHONPATH"].split(os.pathsep)
    assert Path(code).name == "inject"
    assert Path(copy) == copied
    files = {path.name for path in copied.iterdir()}
    assert files == {"_dpro_autoload.py", "dpro_recorder-0.dist-info", _dpro_autoload.ARCHIVE}
    with zipfile.ZipFile(copied / _dpro_autoload.ARCHIVE) as archive:
        modules = {"hooks.py", "calls/flight.py", "serving/__init__.py", "serving/vllm.py", "sparks.py"}
        assert {f"{_dpro_autoload.ALIAS}/{module}" for module in modules} <= {*archive.namelist()}
    assert all(not path.stat().st_mode & 0o077 for path in (copied, copied.parent, copied.parents[1]))


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o755])
def test_there_is_no_copy_where_others_could_put_one(tmp_path, mode):
    above = tmp_path / "above"
    (above / "run").mkdir(parents=True, mode=0o700)
    above.chmod(mode)
    assert is_out_of_reach(above / "run") is (mode in (0o1777, 0o755))


def test_there_is_no_copy_below_a_folder_of_another_user(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    assert is_out_of_reach(tmp_path / "run")
    real = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = list(real(path))
        found[4] = OTHER if path == tmp_path else found[4]
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert not is_out_of_reach(tmp_path / "run")


@pytest.mark.parametrize("which", [".", ".."])
def test_copy_that_others_may_enter_is_not_loaded(copied, which, monkeypatch):
    monkeypatch.delitem(sys.modules, _dpro_autoload.ALIAS, raising=False)
    (copied / which).resolve().chmod(0o750)
    with pytest.raises(PermissionError, match="does not belong to this user"):
        _dpro_autoload._install(str(copied.parent), str(copied / _dpro_autoload.ARCHIVE))
    assert _dpro_autoload.ALIAS not in sys.modules


@pytest.mark.usefixtures("as_another")
def test_copy_of_another_user_is_not_loaded(tmp_path):
    (tmp_path / "recorder").mkdir()
    (tmp_path / "recorder" / _dpro_autoload.ARCHIVE).write_bytes(b"code")
    with pytest.raises(PermissionError, match="does not belong to this user"):
        _dpro_autoload._install(str(tmp_path), str(tmp_path / "recorder" / _dpro_autoload.ARCHIVE))


# A real second user, as far as this one may become them.


def became(user: int, action: Callable[[], object]) -> str:
    """What an action raises when another user does it; empty for nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            said = ""
            try:
                action()
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users can reach."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def test_others_can_neither_read_nor_replace_what_is_being_recorded(shared):
    launch = Launch(shared / "run", "host-1")
    before = os.umask(0)
    try:
        claim(launch.run)
        make_raw(launch)
        (launch.raw / "config.json").write_text("{}")
    finally:
        os.umask(before)
    attacks: list[Callable[[], object]] = [
        lambda: os.listdir(launch.run / ".raw"),
        lambda: (launch.raw / "config.json").read_text(),
        lambda: (launch.raw / "new").touch(),
        lambda: (launch.run / ".raw").rename(launch.run / "mine"),
        lambda: (launch.run / ".raw").rmdir(),
    ]
    assert [became(OTHER, attack).partition(":")[0] for attack in attacks] == ["PermissionError"] * 5
    assert contents(launch.run) == {".raw": None, ".raw/host-1": None, ".raw/host-1/config.json": b"{}"}


def test_real_other_user_neither_finishes_nor_records_into_a_run(shared):
    launch = Launch(shared / "run", "host-1")
    claim(launch.run)
    make_raw(launch)
    launch.marker.parent.mkdir()
    launch.marker.write_text(json.dumps({"host": "far", "pid": 1, "start_ticks": 1, "command": []}))
    (shared / "empty").mkdir()
    (shared / "empty").chmod(0o777)
    assert became(OTHER, lambda: ensure_finished(launch.run)).startswith("InputError: ")
    assert became(OTHER, lambda: claim(shared / "empty")).startswith("UsageError: ")
    assert launch.raw.is_dir()
    assert launch.marker.exists()


def test_root_neither_finishes_nor_records_into_what_another_user_made(shared):
    def theirs() -> None:
        launch = Launch(shared / "run", "host-1")
        claim(launch.run)
        make_raw(launch)
        launch.marker.parent.mkdir()
        launch.marker.write_text(json.dumps({"host": "far", "pid": 1, "start_ticks": 1, "command": []}))
        (shared / "empty").mkdir()

    assert became(OTHER, theirs) == ""
    with pytest.raises(InputError, match=f"belongs to user {OTHER}, not to root"):
        ensure_finished(shared / "run")
    with pytest.raises(UsageError, match=f"belongs to user {OTHER}"):
        claim(shared / "empty")
    with pytest.raises(InputError, match=f"belongs to user {OTHER}"):
        ensure_mine([shared / "empty"])
