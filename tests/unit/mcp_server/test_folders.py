"""Which paths a server of tools reads."""

from __future__ import annotations

import shutil

import pytest

from dpro.errors import InputError, UsageError
from dpro.mcp_server.folders import named_folders, readable, runs_in
from tests.jobs import ROOT

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
    ("path", "said"), [("nothing", "no such file"), ("s3://bucket/run", "is a URL"), ("a\0b", "is no path")]
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
