"""The cache is the user's alone, and nothing that others could have put there is used."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpro.analysis.graphs import graph_of
from dpro.cache import cache_folder, folder_in_use, keep_latest
from dpro.errors import DproError
from dpro.opening import open_path
from tests.builders import cpu_job
from tests.traces import write_rank


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DPRO_CACHE", str(tmp_path / "kept" / "cache"))
    return tmp_path / "kept" / "cache"


def mode(folder: Path) -> int:
    return folder.stat().st_mode & 0o777


def test_only_the_user_can_read_or_write_it_whatever_the_umask(root):
    before = os.umask(0)
    try:
        folder = cache_folder("graphs")
    finally:
        os.umask(before)
    assert folder == root / "graphs"
    assert (mode(root), mode(folder)) == (0o700, 0o700)


def test_a_folder_that_an_earlier_version_made_for_all_is_closed(root):
    (root / "graphs").mkdir(parents=True)
    (root / "graphs").chmod(0o755)
    assert mode(cache_folder("graphs")) == 0o700


@pytest.mark.parametrize("place", ["", "imports"])
def test_a_link_is_not_used(root, tmp_path, place):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / place).parent.mkdir(parents=True)
    (root / place).symlink_to(elsewhere)
    with pytest.raises(DproError, match=r"is a link, .* DPRO_CACHE"):
        cache_folder("imports")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("place", ["", "imports"])
def test_a_folder_of_another_user_is_not_used(root, monkeypatch, place):
    (root / "imports").mkdir(parents=True)
    theirs, lstat = root / place, Path.lstat

    def owned(path: Path) -> os.stat_result:
        facts = list(lstat(path))
        facts[4] += 1 if path == theirs else 0
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "lstat", owned)
    with pytest.raises(DproError, match="belongs to another user"):
        cache_folder("imports")


def test_without_a_cache_graphs_are_built_and_traces_are_refused_in_one_line(root, tmp_path):
    root.mkdir(parents=True)
    (root / "graphs").symlink_to(tmp_path)
    (root / "imports").symlink_to(tmp_path)
    assert graph_of(cpu_job().write(tmp_path / "run"))[1].answerable
    write_rank(tmp_path / "traces", 0)
    with pytest.raises(DproError, match=r"^[^\n]*imports: is a link[^\n]*$"):
        open_path(tmp_path / "traces")


def test_a_place_where_nothing_can_be_made_is_said(root, monkeypatch):
    root.parent.mkdir()
    root.write_text("a file")
    with pytest.raises(DproError, match="is not a folder"):
        cache_folder("graphs")
    monkeypatch.setenv("DPRO_CACHE", str(root / "below"))
    with pytest.raises(DproError, match="cannot be made"):
        cache_folder("graphs")


def test_of_many_files_those_used_last_are_kept(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.loop").touch()
        os.utime(tmp_path / f"{number}.loop", (number, number))
    (tmp_path / "module.pyc").touch()
    os.utime(tmp_path / "module.pyc", (0, 0))
    keep_latest(tmp_path, "*.loop", 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["3.loop", "4.loop", "module.pyc"]


def test_an_import_removes_imports_that_were_not_opened_for_months(root, tmp_path):
    for name in ("old", "opened", "new"):
        (tmp_path / name).mkdir()
        write_rank(tmp_path / name, 0)
    old, opened = (open_path(tmp_path / name).path for name in ("old", "opened"))
    for run in (old, opened):
        os.utime(run, (0, 0))
    open_path(tmp_path / "opened")
    new = open_path(tmp_path / "new").path
    assert {run.name for run in (root / "imports").iterdir()} == {opened.name, new.name}


HOLDER = """
import sys, time
from pathlib import Path
from dpro.cache import folder_in_use
with folder_in_use(Path(sys.argv[1]), "shares-") as folder:
    (folder / "rank00000.npz").write_text("work")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_folders_of_killed_processes_are_removed_and_those_of_others_stay(tmp_path):
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        dead, alive = (Path(str(each.stdout and each.stdout.readline()).strip()) for each in holders)
        holders[0].kill()
        holders[0].wait()
        (tmp_path / "kept.npz").write_text("a graph")
        with folder_in_use(tmp_path, "shares-") as first, folder_in_use(tmp_path, "shares-") as second:
            there = {each.name for each in tmp_path.iterdir()}
            assert there == {alive.name, first.name, second.name, "kept.npz"}
            assert (alive / "rank00000.npz").read_text() == "work"
        assert not dead.exists()
        assert {each.name for each in tmp_path.iterdir()} == {alive.name, "kept.npz"}
    finally:
        for each in holders:
            each.kill()
            each.communicate()


def test_a_folder_that_no_process_has_locked_yet_stays_until_it_is_old(tmp_path):
    young, old = tmp_path / "shares-young", tmp_path / "shares-old"
    for each in (young, old):
        each.mkdir()
    os.utime(old, (0, 0))
    with folder_in_use(tmp_path, "shares-"):
        assert young.exists()
        assert not old.exists()


def test_a_folder_that_another_command_removed_at_once_is_made_again(tmp_path, monkeypatch):
    real, removed = fcntl.flock, []

    def removing(lock, how):
        if not removed:
            (made,) = tmp_path.iterdir()
            removed.append(made)
            shutil.rmtree(made)
        real(lock, how)

    monkeypatch.setattr(fcntl, "flock", removing)
    with folder_in_use(tmp_path, "shares-") as folder:
        assert folder.is_dir()
        assert removed != [folder]
