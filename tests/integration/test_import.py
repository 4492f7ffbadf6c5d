"""`dpro import` and what it hands to every other command, through the real command line."""

from __future__ import annotations

import collections
import gzip
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.cache import folder_in_use
from dpro.cli.analysis import open_or_import
from dpro.errors import InputError
from dpro.ingest.derived import find_steps
from dpro.ingest.importer import STAGING_SUFFIX, import_sources
from dpro.ingest.kineto import read_trace
from dpro.opening import open_path
from dpro.schema import COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.store import open_run
from tests.commands import dpro, in_own_process, refused
from tests.traces import cpu_op, kernel, write, write_dump, write_rank
from tests.unit.extensions.nsys.exports import session

MULTIRANK = {
    "nanogpt_h100_8r_rs_ag": (8, 8, 4),
    "torchrec_v100_4r_sleep1s_rank2": (4, 4, 3),
    "torchrec_v100_4r_a2a_ar": (4, 4, 3),
    "torchrec_v100_2r_kjt": (2, 2, 3),
    "param_dlrm_v100_8r": (8, 8, 1),
    "lightllm_h200_8r_deepep_cudagraph": (8, 8, 0),
    "hta_a100_sampled_0_1_of_128": (2, 128, 2),
}


def _plain_reading(path: Path) -> dict[str, float]:
    """Count the kernels of one file with plain dictionaries: count, total µs, and how many communicate."""
    document = json.loads(gzip.decompress(path.read_bytes()))
    totals: dict[str, float] = collections.Counter()
    for event in document["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            name = event["name"]
            totals["kernels"] += 1
            totals["us"] += event["dur"]
            totals["communication"] += any(mark in name for mark in ("nccl", "deep_ep::internode_ll::"))
    return totals


@pytest.mark.few(3)
@pytest.mark.parametrize("folder", MULTIRANK)
def test_tables_agree_with_a_plain_reading_of_the_files(folder, traces):
    source = traces / "multirank" / folder
    ranks, world_size, steps = MULTIRANK[folder]
    run = open_path(source)
    manifest = run.manifest
    spans, collectives = run.table(SPANS), run.table(COLLECTIVES)
    assert (manifest.ranks, manifest.world_size) == (list(range(ranks)), world_size)
    assert run.table(STEPS)["step"].n_unique() == steps
    for rank in range(ranks):
        plain = _plain_reading(next(source.glob(f"rank{rank}.*")))
        kernels = spans.filter((pl.col("rank") == rank) & (pl.col("kind") == "kernel"))
        assert kernels.height == plain["kernels"]
        assert kernels["duration_ns"].sum() == round(plain["us"] * 1000)
        assert collectives.filter(pl.col("rank") == rank).height == plain["communication"] > 0


def test_optimizer_annotations_alone_give_the_steps_that_the_profiler_marked(traces):
    path = traces / "multirank" / "nanogpt_h100_8r_rs_ag" / "rank0.pt.trace.json.gz"
    spans = read_trace(path).frames["spans"].filter(~pl.col("name").str.starts_with("ProfilerStep#"))
    assert find_steps(spans)["source"].to_list() == ["optimizer annotation"] * 4


def test_the_execution_trace_beside_a_kineto_trace_adds_dependencies_to_its_spans(traces, tmp_path):
    folder = traces / "multirank" / "param_dlrm_v100_8r"
    done = dpro("import", folder, "-o", tmp_path / "run", "--json")
    document = json.loads(done.stdout)
    assert document["skipped"]["further execution traces of a rank"] == 8
    assert document["rows"]["dependencies"] > 0
    import_sources([folder / f"rank{rank}.pt.trace.json.gz" for rank in range(8)], tmp_path / "alone")
    alone = open_run(tmp_path / "alone").rows()
    assert {name: rows for name, rows in document["rows"].items() if name != "dependencies"} == {
        name: rows for name, rows in alone.items() if name != "dependencies"
    }


def test_json_holds_what_was_imported(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path / "in", rank)
    done = dpro("import", tmp_path / "in", "-o", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert document["ranks"] == [0, 1]
    assert document["world_size"] == 2
    assert document["missing_ranks"] == document["warnings"] == []
    assert document["skipped"] == {}
    assert {name: count for name, count in document["rows"].items() if count} == {
        "spans": 12,
        "collectives": 2,
        "workers": 2,
    }


def test_the_same_input_gives_the_same_bytes(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path / "in", rank)
    for name in ("a", "b"):
        import_sources([tmp_path / "in"], tmp_path / name)
    first, second = (
        [path for path in sorted((tmp_path / name).rglob("*")) if path.is_file()] for name in "ab"
    )
    assert [path.name for path in first] == [path.name for path in second]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_several_sources_are_one_run(tmp_path):
    paths = [write_rank(tmp_path / f"node{rank}", rank) for rank in (0, 1)]
    assert import_sources([paths[0], paths[1].parent], tmp_path / "run").ranks == [0, 1]


def test_a_missing_rank_is_a_warning_and_named(tmp_path):
    for rank in (0, 2):
        write_rank(tmp_path / "in", rank, world_size=4)
    done = dpro("import", tmp_path / "in", "-o", tmp_path / "run", "--json")
    assert done.returncode == 0
    assert done.stderr == "dpro: warning: 2 of 4 ranks are missing: 1, 3\n"
    assert json.loads(done.stdout)["missing_ranks"] == [1, 3]


def test_the_world_is_at_least_as_large_as_the_highest_rank(tmp_path):
    write(tmp_path / "in" / "rank5.json", [cpu_op("a", 1, 2)])
    assert import_sources([tmp_path / "in"], tmp_path / "run").world_size == 6


def test_files_without_a_rank_are_numbered_by_name_with_a_warning(tmp_path):
    for name in ("b.json", "a.json"):
        write(tmp_path / "in" / name, [cpu_op(name, 1, 2)])
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    spans = open_run(tmp_path / "run").table(SPANS)
    assert spans.select("rank", "name").rows() == [(0, "a.json"), (1, "b.json")]
    assert [warning.split(":")[0] for warning in manifest.warnings] == ["a.json", "b.json"]


def test_one_bad_rank_does_not_stop_the_others(tmp_path):
    write_rank(tmp_path / "in", 0)
    bad = write_rank(tmp_path / "in", 1)
    bad.write_bytes(bad.read_bytes()[:80])
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    assert manifest.ranks == [0]
    assert any("rank1.json.gz" in warning and "cut short" in warning for warning in manifest.warnings)


def test_a_damaged_rank_is_read_as_far_as_it_goes_with_a_warning(tmp_path):
    bad = write_rank(tmp_path / "in", 0, world_size=1)
    bad.write_bytes(bad.read_bytes()[:-30])
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    assert manifest.ranks == [0]
    assert "damaged" in manifest.warnings[0]
    assert open_run(tmp_path / "run").table(SPANS).height > 0


def _truncated(folder: Path) -> Path:
    path = write_rank(folder, 0)
    path.write_bytes(path.read_bytes()[:80])
    return path


def _truncated_json(folder: Path) -> Path:
    path = write(folder / "rank0.json", [cpu_op("a", 1, 2)])
    path.write_text(path.read_text()[:60])
    return path


def _not_a_trace(folder: Path) -> Path:
    path = folder / "notes.txt"
    folder.mkdir()
    path.write_text("hello")
    return path


def _empty_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _two_jobs(folder: Path) -> Path:
    write_rank(folder / "first", 0)
    write_rank(folder / "second", 0)
    return folder


def test_of_a_folder_around_another_the_file_is_named_that_can_be_given(tmp_path):
    inner, outer = write_rank(tmp_path / "in" / "deeper", 0), write_rank(tmp_path / "in", 0)
    done = dpro("import", tmp_path / "in", "-o", tmp_path / "run")
    assert done.returncode == 1
    choices = {done.stderr.rpartition("such as ")[2].strip()}
    assert choices <= {f"{inner.parent} or {outer}", f"{outer} or {inner.parent}"}


def _two_of_one_rank(folder: Path) -> Path:
    written = write_rank(folder, 0)
    shutil.copy(written, written.with_name(f"again-{written.name}"))
    return folder


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_truncated, "gzip stream cut short"),
        (_truncated_json, "JSON cut short"),
        (_not_a_trace, "no trace found (1 file that is not a trace)"),
        (_empty_folder, "no trace found (no files)"),
        (lambda folder: folder / "nowhere", "no such file or folder"),
        (_two_jobs, "both are rank 0; if each is a job of its own, give dpro one of them"),
        (_two_of_one_rank, "both are rank 0; give dpro one of them, or import each as a separate run"),
    ],
)
def test_a_bad_source_is_one_line_and_leaves_nothing(make, what, tmp_path):
    source = make(tmp_path / "in")
    (tmp_path / "out").mkdir()
    line = refused(dpro("import", source, "-o", tmp_path / "out" / "run"), 1)
    assert what in line
    assert str(source) in line
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [("report.nsys-rep", b"QDSS\0\1"), ("report_pqtdir/CUPTI_ACTIVITY_KIND_KERNEL.parquet", b"PAR1\0")],
)
def test_what_nsight_systems_alone_reads_is_answered_with_how_to_export_it(tmp_path, name, content):
    file = tmp_path / "in" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    line = refused(dpro(tmp_path / "in"), 1)
    assert "1 report of Nsight Systems" in line
    assert "`nsys export --type sqlite FILE.nsys-rep` writes what dpro reads" in line


def test_an_archive_of_nsys_jax_is_answered_with_the_report_to_export(tmp_path):
    archive, names = tmp_path / "job.zip", ("device-metadata.parquet", "nvtx_gpu_proj_trace/trace.parquet")
    with zipfile.ZipFile(archive, "w") as packed:
        for name in names:
            packed.writestr(name, b"PAR1\0")
    line = refused(dpro(archive), 1)
    assert "2 tables of nsys-jax without kernels" in line
    assert "`nsys export --type sqlite FILE.nsys-rep`, then `dpro FILE.sqlite`" in line
    with zipfile.ZipFile(archive, "a") as packed:
        packed.writestr("report.nsys-rep", b"QDSS\0\1")
    line = refused(dpro(archive), 1)
    assert "1 report of Nsight Systems; 2 tables of nsys-jax" in line


def test_an_export_beside_the_tables_of_nsys_jax_is_read(tmp_path):
    database = session()
    database.kernel("gemm", 5, 9)
    archive = tmp_path / "job.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("device-metadata.parquet", b"PAR1\0")
        packed.write(database.write(tmp_path / "report.sqlite"), "report.sqlite")
    manifest = import_sources([archive], tmp_path / "run", jobs=1)
    assert (manifest.ranks, manifest.skipped) == ([0], {"tables of nsys-jax without kernels": 1})


def test_an_output_that_exists_is_refused_and_untouched(tmp_path):
    write_rank(tmp_path / "in", 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("mine")
    line = refused(dpro("import", tmp_path / "in", "-o", tmp_path / "run"), 2)
    assert "exists already" in line
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["precious"]


def test_an_empty_output_folder_is_filled(tmp_path):
    write_rank(tmp_path / "in", 0)
    (tmp_path / "run").mkdir()
    assert import_sources([tmp_path / "in"], tmp_path / "run").ranks == [0]


def test_an_interrupted_import_leaves_nothing_behind(tmp_path):
    write_rank(tmp_path / "in", 0)

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_sources([tmp_path / "in"], tmp_path / "out" / "run", progress=interrupt)
    assert list((tmp_path / "out").iterdir()) == []


def _info(path: Path, cache: Path | None = None) -> dict[str, Any]:
    done = dpro("info", path, "--json", cache=cache)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_what_killed_imports_left_is_removed_by_the_next_and_one_that_runs_keeps_its_own(tmp_path):
    write_rank(tmp_path / "traces", 0)
    with folder_in_use(tmp_path, ".run.", STAGING_SUFFIX) as left:
        killed = tmp_path / ".run.killed.importing"
        shutil.copytree(left, killed)  # whose lock went with its process
        import_sources([tmp_path / "traces"], tmp_path / "run")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([left.name, "run", "traces"])
    assert open_run(tmp_path / "run").manifest.ranks == [0]


def test_info_says_what_a_run_holds_and_lacks(traces):
    document = _info(traces / "multirank" / "param_dlrm_v100_8r")
    assert document["steps"] == 1
    assert document["gpus"] == ["Tesla V100-SXM2-32GB"]
    coverage = document["coverage"]
    assert coverage["collective_bytes_known"] == 1.0
    assert coverage["collective_group_known"] == 0.0
    assert coverage["kernel_time_classified"] > 0.95


def test_info_in_words_names_the_ranks_that_are_missing(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=2)
    import_sources([tmp_path / "in"], tmp_path / "run")
    done = dpro("info", tmp_path / "run")
    assert "1 of 2, missing 1" in done.stdout
    assert "node0" in done.stdout


def test_traces_are_imported_once_until_a_file_changes(tmp_path):
    source = write_rank(tmp_path / "in", 0)
    cache = tmp_path / "cache"
    first = _info(tmp_path / "in", cache)["cache"]
    assert _info(tmp_path / "in", cache)["cache"] == first
    os.utime(source, ns=(1, 1))
    assert _info(tmp_path / "in", cache)["cache"] != first
    assert Path(first).is_relative_to(cache)


def test_a_path_that_does_not_exist_is_one_line(tmp_path):
    assert "no such file or folder" in refused(dpro("info", tmp_path / "nowhere"), 1)


def test_a_run_directory_is_opened_where_it_is(tmp_path):
    write_rank(tmp_path / "in", 0)
    import_sources([tmp_path / "in"], tmp_path / "run")
    assert open_or_import(tmp_path / "run").path == tmp_path / "run"


def test_flight_recorder_dumps_of_a_real_hang_are_a_run(traces, tmp_path):
    manifest = import_sources([traces / "flight_recorder" / "lock_gil_1st"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert manifest.ranks == list(range(16))
    assert manifest.skipped == {"files that are not traces": 1}
    assert run.table(COLLECTIVES).height == 142
    assert run.table(WORKERS).height == 16


def test_a_rank_may_have_a_kineto_trace_and_a_flight_recorder_dump(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path / "in", rank)
        write_dump(tmp_path / "in", rank)
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert manifest.ranks == [0, 1]
    assert manifest.versions["nccl"] == "2.27.3"
    assert manifest.sources["collectives"] == "flight recorder, kineto"
    collectives = run.table(COLLECTIVES)
    assert sorted(collectives.select("rank", "window").rows()) == [(0, -1), (0, 0), (1, -1), (1, 0)]
    assert collectives.select(pl.struct("rank", "collective_id").is_unique().all()).item()
    worker = run.table(WORKERS).filter(rank=0).row(0, named=True)
    assert run.table(WORKERS).height == 2
    assert (worker["host"], worker["source"]) == ("node0", "kineto, flight recorder")


def test_merged_ranks_are_the_same_bytes_in_processes(tmp_path):
    for rank in (0, 1):
        write_rank(tmp_path / "in", rank)
        write_dump(tmp_path / "in", rank)
    for name, jobs in (("one", 1), ("two", 2)):
        import_sources([tmp_path / "in"], tmp_path / name, jobs=jobs)
    first, second = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in ("one", "two")
    )
    assert first == second


def test_two_files_of_different_formats_that_describe_the_same_are_an_error_that_names_both(traces, tmp_path):
    write_rank(tmp_path / "in", 0)
    pipeline = traces / "pp_timeline" / "primus_pp8" / "pp_rank_0.json.gz"
    with pytest.raises(InputError, match=r"rank0\.json\.gz.*pp_rank_0|pp_rank_0.*rank0\.json\.gz") as caught:
        import_sources([tmp_path / "in", pipeline], tmp_path / "run")
    assert "both are rank 0 and have its spans" in str(caught.value)


def test_a_rank_that_no_job_has_is_left_out(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    write_rank(tmp_path / "in", 5_000_000)
    (warning,) = import_sources([tmp_path / "in"], tmp_path / "run").warnings
    assert "claims to be rank 5000000 of 2" in warning


def test_gpu_time_that_no_class_explains_is_printed(tmp_path):
    events = [kernel("gemm_kernel", 0, 30), kernel("my_own_kernel", 40, 10), cpu_op("a", 1, 2)]
    write(tmp_path / "in" / "rank0.json", events)
    done = dpro("import", tmp_path / "in", "-o", tmp_path / "run")
    words = "1 of unknown kind, 25.0% of GPU time: my_own_kernel"
    assert words in done.stdout
    assert words in dpro("info", tmp_path / "run").stdout
    document = _info(tmp_path / "run", tmp_path / "cache")
    unclassified = document["coverage"]["unclassified"]
    assert (unclassified["kernels"], unclassified["share"], unclassified["time_ms"]) == (1, 0.25, 0.01)
    assert document["coverage"]["kernel_time_classified"] == 0.75
    again = dpro("import", tmp_path / "in", "-o", tmp_path / "again", "--json")
    assert json.loads(again.stdout)["coverage"]["unclassified"] == unclassified


@pytest.mark.slow
def test_classes_of_the_users_own_count_and_change_what_is_cached(tmp_path, monkeypatch):
    def info() -> dict[str, Any]:
        done = in_own_process("info", tmp_path / "in", "--json", cache=tmp_path / "cache")
        return json.loads(done.stdout)

    write(tmp_path / "in" / "rank0.json", [kernel("my_own_kernel", 40, 10), cpu_op("a", 1, 2)])
    before = info()
    classes = tmp_path / "classes.toml"
    classes.write_text("[[class]]\npattern = 'my_own'\nkind = 'communication'\nop = 'all_reduce'\n")
    monkeypatch.setenv("DPRO_CLASSES", str(classes))
    after = info()
    assert before["coverage"]["unclassified"]["share"] == 1.0
    assert after["coverage"]["unclassified"]["share"] == 0.0
    assert (before["rows"]["collectives"], after["rows"]["collectives"]) == (0, 1)
    classes.write_text("[[class]]\nkind = 'gemm'\n")
    done = in_own_process("import", tmp_path / "in", "-o", tmp_path / "run")
    assert "class 1 ('')" in refused(done, 1)


def test_a_run_among_the_sources_is_counted_and_passed_over(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    import_sources([tmp_path / "in"], tmp_path / "in" / "earlier")
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    assert manifest.warnings == ["only traces are read, not 1 run in the same place: earlier"]
    assert manifest.skipped == {"JSON files that are not traces": 1, "tables of dpro runs": 3}
    line = refused(dpro("import", tmp_path / "run", "-o", tmp_path / "other"), 1)
    assert line.endswith(f"run: 1 run here; choose one: {tmp_path / 'run'}")


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the Kineto files that are read, each time they are."""
    names: list[str] = []

    def read(source, **how):
        names.append(source.name)
        return read_trace(source, **how)

    monkeypatch.setattr("dpro.ingest.kineto.read_trace", read)
    return names


def test_files_that_do_not_state_their_rank_are_read_once(reads, tmp_path):
    events = [cpu_op("a", 1, 2), kernel("gemm", 5, 2)]
    for name in ("a", "b"):
        write(tmp_path / "in" / f"{name}.json", events)
    write_rank(tmp_path / "in", 0)  # so that they are not what their places say
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    assert sorted(reads) == ["a.json", "b.json", "rank0.json.gz"]
    assert manifest.ranks == [0, 1, 2]
    assert [line for line in manifest.warnings if "no rank information" in line] == [
        "a.json: no rank information; assumed to be rank 1, by order of file names",
        "b.json: no rank information; assumed to be rank 2, by order of file names",
    ]
    for rank in (1, 2):
        write(tmp_path / "named" / f"rank{rank}.json", events)
    import_sources([tmp_path / "named"], tmp_path / "expected")
    for table in (SPANS, STEPS, WORKERS):
        found, expected = (
            open_run(tmp_path / "run").table(table),
            open_run(tmp_path / "expected").table(table),
        )
        assert found.filter(found["rank"] > 0).equals(expected)


def test_the_peer_of_a_file_without_a_rank_follows_from_the_rank_it_is_given(tmp_path):
    sent = {"Collective name": "send", "Process Group Name": "1", "Process Group Ranks": "[1, 0]"}
    sent |= {"In msg nelems": 4, "Out msg nelems": 4, "dtype": "Float", "Dst Rank": 0}
    events = [cpu_op("a", 1, 2), kernel("ncclDevKernel_SendRecv(args)", 5, 2, **sent)]
    write(tmp_path / "in" / "a.json", events)
    write(tmp_path / "in" / "b.json", events)
    import_sources([tmp_path / "in"], tmp_path / "run")
    sends = open_run(tmp_path / "run").table(COLLECTIVES)
    # Rank 0 does not send to itself: there, 0 is a number within the group.
    assert sends.select("rank", "op", "peer").rows() == [(0, "send", 1), (1, "send", 0)]


def test_what_is_imported_on_the_fly_goes_by_the_name_that_the_user_gave_it(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    info = _info(tmp_path / "in", tmp_path / "cache")
    assert info["run"] == str(tmp_path / "in")
    assert open_run(info["cache"]).manifest.ranks == [0]
    assert _info(info["cache"], tmp_path / "cache") == info | {"run": info["cache"], "cache": None}


def test_damage_is_said_each_time_that_a_command_opens_the_traces(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    path = tmp_path / "in" / "rank0.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    for _ in range(2):
        assert "rank0.json.gz: damaged" in dpro("report", tmp_path / "in", cache=tmp_path / "cache").stderr
        done = dpro("info", tmp_path / "in", cache=tmp_path / "cache")
        assert " ".join(done.stdout.split()).count("rank0.json.gz: damaged") == 1
        assert done.stderr == ""


def test_links_to_folders_are_counted_and_not_followed(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    (tmp_path / "in" / "again").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "gone").symlink_to(tmp_path / "nowhere")
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    assert (manifest.ranks, manifest.warnings) == ([0], [])
    assert manifest.skipped == {"links to folders, which are not followed": 1}
    with pytest.raises(InputError, match="a broken link"):
        import_sources([tmp_path / "in" / "gone"], tmp_path / "other")


def test_a_folder_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    write_rank(tmp_path / "in", 0)
    write_rank(tmp_path / "in" / "closed", 1)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    manifest = import_sources([tmp_path / "in"], tmp_path / "run")
    assert manifest.missing_ranks == [1]
    assert f"left out: {tmp_path / 'in' / 'closed'}: cannot be read (Permission denied)" in manifest.warnings
    with pytest.raises(InputError, match=r"closed: cannot be read \(Permission denied\)"):
        import_sources([tmp_path / "in" / "closed"], tmp_path / "other")
