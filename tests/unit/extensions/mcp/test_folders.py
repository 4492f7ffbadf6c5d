"""Which paths a server of tools reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dpro.errors import InputError, UsageError
from dpro.extensions.mcp.tools import call, named_folders, readable, runs_in
from dpro.replay.whatif.grammar import keys_of, with_paths
from dpro.replay.whatif.registry import all_kinds, parse_edit
from tests.jobs import ROOT
from tests.traces import annotation, cpu_op, write

SAMPLE = ROOT / "sample_traces" / "slow_rank"


@pytest.fixture
def served(tmp_path):
    folder = tmp_path / "served"
    shutil.copytree(SAMPLE, folder / "team" / "run")
    return named_folders([folder])


def test_runs_below_the_folders_are_listed_and_read_by_relative_and_absolute_paths(served):
    run = served[0] / "team" / "run"
    assert runs_in(served) == [str(run)]
    assert readable("team/run", served) == readable(str(run), served) == run
    assert readable("team/../team/run", served) == run


@pytest.mark.parametrize("path", ["..", "../..", "team/../../..", "/", "/etc/passwd", str(SAMPLE)])
def test_a_path_that_leads_out_is_refused(served, path):
    with pytest.raises(InputError, match="leads out of"):
        readable(path, served)


@pytest.mark.parametrize("edit", ["paths:file=", "beside:run="])
@pytest.mark.parametrize("path", ["/etc/hosts", "../outside", "out", "file:///etc/hosts", "a\0b"])
def test_an_edit_that_names_a_file_outside_is_refused(served, tmp_path, edit, path):
    (tmp_path / "outside").touch()
    (served[0] / "out").symlink_to(tmp_path / "outside")
    with pytest.raises(InputError, match=r"leads out of|no such file|is not a path"):
        call("whatif", {"run": "team/run", "edits": [f"{edit}{path}"]}, served)


def test_an_edit_reads_the_file_that_is_meant_in_the_served_folder(served, tmp_path, monkeypatch):
    (served[0] / "plan.json").touch()
    monkeypatch.chdir(tmp_path)
    edit = with_paths(parse_edit("paths:file=plan.json,split=no"), lambda path: readable(str(path), served))
    assert str(edit) == f"paths:file={served[0] / 'plan.json'},split=no"


def test_traces_that_have_changed_are_read_again(served):
    folder = served[0] / "traces"
    folder.mkdir()

    def steps(count):
        marks = [annotation(f"ProfilerStep#{step}", 100 * step, 100) for step in range(count)]
        write(folder / "rank0.json", [*marks, cpu_op("aten::mm", 1, 2)])
        return call("info", {"run": "traces"}, served).steps

    assert (steps(2), steps(4)) == (2, 4)


def test_all_keys_that_name_files_say_so():
    """Else they would be read wherever they lie."""
    keys = [(kind.name, key) for kind in all_kinds() for key in keys_of(kind).values()]
    named = {f"{name}:{key.name}" for name, key in keys if key.type is Path}
    assert named == {"paths:file", "beside:run", "tensors:plan"}


def test_a_folder_whose_name_merely_begins_like_a_served_one_is_refused(served, tmp_path):
    (tmp_path / "served-not").mkdir()
    with pytest.raises(InputError, match="leads out of"):
        readable("../served-not", served)


def test_links_that_lead_out_are_refused_wherever_they_are(served):
    folder = served[0]
    (folder / "link").symlink_to(SAMPLE)
    with pytest.raises(InputError, match="leads out of"):
        readable("link", served)
    (folder / "team" / "run" / "spans" / "more.parquet").symlink_to("/etc/passwd")
    with pytest.raises(InputError, match=r"its link more\.parquet leads out of"):
        readable("team/run", served)


def test_links_within_the_folders_are_followed_and_those_behind_them_are_checked(served):
    folder = served[0]
    (folder / "link").symlink_to(folder / "team")
    assert readable("link/run", served) == folder / "team" / "run"
    (folder / "traces").mkdir()
    (folder / "traces" / "more").symlink_to(folder / "team")
    assert readable("traces", served) == folder / "traces"
    (folder / "team" / "outside").symlink_to("/etc")
    with pytest.raises(InputError, match="its link outside leads out of"):
        readable("traces", served)


@pytest.mark.parametrize(
    ("path", "said"),
    [("nothing", "no such file"), ("s3://bucket/run", "is a URL"), ("a\0b", "is not a path")],
)
def test_what_is_no_path_here_is_refused(served, path, said):
    with pytest.raises(InputError, match=said):
        readable(path, served)


def test_a_recording_that_is_not_finished_is_refused_and_stays_as_it_is(served):
    recording = served[0] / "team" / "run" / ".recording"
    recording.mkdir()
    (recording / "host-1.json").write_text("{}")
    before = sorted(served[0].rglob("*"))
    with pytest.raises(InputError, match="not finished"):
        readable("team/run", served)
    assert sorted(served[0].rglob("*")) == before


def test_a_folder_that_does_not_exist_or_is_a_file_is_bad_usage(tmp_path):
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        named_folders([tmp_path / "nowhere"])
    file = tmp_path / "trace.json"
    file.touch()
    with pytest.raises(UsageError, match=f"{file}: is a file; name its folder, {tmp_path}$"):
        named_folders([file])
