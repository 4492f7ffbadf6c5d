"""Profiles of XLA's profiler, on small ones made here."""

from __future__ import annotations

import builtins
import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import inputs_of_step
from dpro.classify import classify
from dpro.errors import InputError, MissingExtra, Unanswerable
from dpro.extensions.xplane import xspace
from dpro.extensions.xplane.importers import XPLANE
from dpro.ingest.formats import registry, why_passed_over
from dpro.ingest.importer import import_sources
from dpro.ingest.trace import RankTrace
from dpro.recorders import SHAPES, how_to_record
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.registry import all_kinds, parse_edit
from dpro.schema import TABLES, conform
from dpro.store import open_run
from dpro.verdict.facts import JobFacts
from dpro.verdict.ledger import LIMIT_OF
from dpro.verdict.ranking import advise
from dpro.verdict.verdict import explain
from tests.perfetto_traces import pftrace
from tests.xplane_profiles import Plane, gpu_profile, profile


def read(tmp_path: Path, *planes: Plane, name: str = "host3.xplane.pb") -> RankTrace:
    path = tmp_path / name
    path.write_bytes(profile(*planes))
    assert registry().find(path.read_bytes()[: 1 << 16]) is XPLANE
    trace = XPLANE.read(path)
    assert isinstance(trace, RankTrace)
    return trace


def rows(trace: RankTrace, table: str = "spans") -> list[dict[str, Any]]:
    return conform(TABLES[table], trace.frames[table]).rows(named=True)


def test_a_kernel_has_its_device_its_stream_and_the_call_that_launched_it(tmp_path):
    host, device = Plane("/host:CPU"), Plane("/device:GPU:4", gpu="a name")
    host.line("python", ("cuLaunchKernel", 100, 50, {"correlation_id": 7}), number=-11, start_ns=1000)
    device.line("Stream #13(Compute)", ("_Z4gemmi", 200, 60.6, {"correlation_id": 7}), start_ns=1000)
    call, kernel = rows(read(tmp_path, host, device))
    assert (call["kind"], call["start_ns"], call["duration_ns"]) == ("runtime", 1100, 50)
    assert call["tid"] >= 0
    assert (kernel["name"], kernel["kind"], kernel["device"]) == ("gemm(int)", "kernel", 4)
    assert (kernel["stream"], kernel["start_ns"], kernel["duration_ns"]) == (13, 1200, 60)
    assert kernel["correlation"] == call["correlation"] == 7
    assert (kernel["tid"], kernel["pid"], call["stream"]) == (-1, -1, -1)


def test_copies_have_their_bytes_and_are_called_as_elsewhere(tmp_path):
    device = Plane("/device:GPU:0")
    size = {"memcpy_details": "kind_src:device size:4096 dest:0 async:1"}
    device.line("Stream #5(MemcpyD2H)", ("MemcpyD2H", 0, 10, size), ("Memset", 20, 10))
    copy, fill = rows(read(tmp_path, device))
    assert (copy["name"], copy["kind"], copy["bytes"]) == ("Memcpy DtoH", "memcpy", 4096)
    assert (fill["kind"], fill["bytes"]) == ("memset", -1)


def test_lines_that_sum_up_others_are_not_counted_twice(tmp_path):
    device = Plane("/device:GPU:0")
    device.line("Stream #5(Compute)", ("gemm", 0, 10))
    for line in ("TensorFlow Ops", "Framework Name Scope", "Source code", "XLA TraceMe"):
        device.line(line, ("gemm", 0, 10))
    trace = read(tmp_path, device)
    assert len(rows(trace)) == 1
    assert trace.skipped == {xspace._SUMS: 4}


def test_operations_of_a_tpu_are_work_and_what_holds_them_is_not(tmp_path):
    device = Plane("/device:TPU:1", device_type_string="TPU v6 Lite")
    device.line("XLA Modules", ("jit_step(7)", 0, 100))
    text = "%all-reduce.3 = f32[8]{0:T(8)} all-reduce(f32[8] %x), replica_groups={}"
    loop = ("%while.1 = (s32[]) while((s32[]) %t)", 0, 60)
    device.line("XLA Ops", loop, ("%fusion.2 = f32[8] fusion()", 0, 0.2), ("fusion.2", 1, 29), (text, 70, 30))
    trace = read(tmp_path, device)
    kinds = {(row["name"], row["duration_ns"]): row["kind"] for row in rows(trace)}
    assert kinds == {
        ("jit_step(7)", 100): "gpu_annotation",
        ("while.1", 60): "gpu_annotation",
        ("fusion.2", 0): "kernel",
        ("fusion.2", 29): "kernel",
        ("all-reduce.3", 30): "kernel",
    }
    (reduction,) = rows(trace, "collectives")
    assert (reduction["op"], reduction["duration_ns"]) == ("all_reduce", 30)
    assert trace.gpus == ["TPU v6 Lite"]


def test_what_runs_beside_the_operations_of_a_tpu_is_on_streams_of_its_own_and_counts_once(tmp_path):
    device = Plane("/device:TPU:0")
    ends = [("all-gather-start.1", 0, 1), ("fusion", 10, 40), ("all-gather-done.1", 50, 30)]
    device.line("XLA Ops", *ends, ("copy-done", 90, 5))
    device.line("Async XLA Ops", ("all-gather-start.1", 0, 80), ("all-gather-start.2", 20, 40))
    trace = read(tmp_path, device)
    work = [
        (row["name"], row["stream"], row["duration_ns"])
        for row in rows(trace)
        if row["kind"] in ("kernel", "memcpy")
    ]
    assert work == [("all-gather.1", 1, 80), ("fusion", 0, 40), ("all-gather.2", 2, 40), ("copy-done", 0, 5)]
    assert [row["op"] for row in rows(trace, "collectives")] == ["all_gather", "all_gather"]


def test_threads_have_ranges_and_calls_of_python_and_no_instants(tmp_path):
    host, device = Plane("/host:CPU"), Plane("/device:GPU:0")
    calls = [("$train.py:12 step", 0, 90), ("$<unknown> __exit__", 95, 1), ("$builtins len", 97, 0)]
    host.line("python", *calls, ("PjitFunction(step)", 10, 50), ("MemoryAllocation", 20, 0), number=11)
    device.line("Stream #5(Compute)", ("gemm", 30, 10))
    trace = read(tmp_path, host, device)
    kinds = {row["name"]: row["kind"] for row in rows(trace) if row["tid"] == 11}
    assert kinds == {
        "train.py(12): step": "python",
        "<unknown> __exit__": "python",
        "builtins len": "python",
        "PjitFunction(step)": "annotation",
    }
    assert trace.skipped == {xspace._INSTANTS: 1}


def steps_of(trace: RankTrace) -> list[tuple[int, int, int, str]]:
    return [(row["step"], row["start_ns"], row["duration_ns"], row["source"]) for row in rows(trace, "steps")]


def test_steps_are_those_that_the_job_numbered(tmp_path):
    host, device = Plane("/host:CPU"), Plane("/device:GPU:0")
    host.line("python", *(("train", 100 * at, 90, {"step_num": 40 + at}) for at in range(2)))
    device.line("Stream #5(Compute)", ("gemm", 30, 10))
    device.line("Steps", ("0", 30, 10))
    assert steps_of(read(tmp_path, host, device)) == [
        (40, 0, 90, "StepTraceAnnotation"),
        (41, 100, 90, "StepTraceAnnotation"),
    ]


def test_without_them_a_step_lasts_from_its_first_device_to_its_last(tmp_path):
    planes = [Plane(f"/device:TPU:{number}") for number in range(2)]
    for number, plane in enumerate(planes):
        late = 10 * number
        plane.line("Steps", *((str(7 + at), 100 * at + late, 95, {"group_id": at}) for at in range(2)))
        plane.line("XLA Ops", *(("fusion", 100 * at + late, 80) for at in range(2)))
    assert steps_of(read(tmp_path, *planes)) == [
        (7, 0, 100, "the profiler's steps"),
        (8, 100, 105, "the profiler's steps"),
    ]


def test_without_steps_the_program_of_a_tpu_that_takes_most_is_a_step(tmp_path):
    device = Plane("/device:TPU:0")
    runs = [
        ("jit_init(1)", 0, 500),
        ("jit_step(2)", 600, 90),
        ("jit_step(2)", 700, 95),
        ("jit_log(3)", 800, 1),
    ]
    device.line("XLA Modules", *runs)
    device.line("XLA Ops", *(("fusion", start, took) for _, start, took in runs))
    host = Plane("/host:CPU")
    host.line("main", ("PjitFunction(step)", 0, 900))
    assert steps_of(read(tmp_path, device, host)) == [
        (0, 600, 90, "program jit_step(2)"),
        (1, 700, 95, "program jit_step(2)"),
    ]


def test_times_are_of_the_wall_clock_where_the_profile_says_when_it_began(tmp_path):
    device = Plane("/device:GPU:0")
    device.line("Stream #5(Compute)", ("gemm", 30, 10))
    metadata = Plane("/host:metadata", process_id=77, jax_version="0.9.1", jaxlib_version="0.9.0")
    host = Plane("/host:CPU")
    host.line("python", ("load", 5, 10))
    began = Plane("Task Environment", profile_start_time=1_700_000_000_000_000_000)
    began.message.stats[0].unsigned, began.message.stats[0].signed = began.message.stats[0].signed, 0
    trace = read(tmp_path, metadata, host, device, began)
    load, kernel = rows(trace)
    assert (load["start_ns"], load["pid"]) == (1_700_000_000_000_000_005, 77)
    assert kernel["start_ns"] == 1_700_000_000_000_000_030
    assert trace.versions == {"xla": "of an unknown version", "jax": "0.9.1", "jaxlib": "0.9.0"}


def test_hosts_are_ranks_in_the_order_of_their_numbers_and_drawn_copies_are_passed_over(tmp_path):
    folder = tmp_path / "plugins" / "profile" / "2026_01_01"
    folder.mkdir(parents=True)
    for number, host in enumerate((2, 10, 1)):
        (folder / f"tpu-w-{host}.xplane.pb").write_bytes(gpu_profile(number, 3))
    drawn = b'{"displayTimeUnit":"ns","metadata":{"highres-ticks":true},"traceEvents":[]}'
    (folder / "tpu-w-1.trace.json.gz").write_bytes(gzip.compress(drawn))
    manifest = import_sources([tmp_path], tmp_path / "run")
    assert manifest.skipped == {"timelines drawn from an analysis": 1}
    assert (manifest.ranks, manifest.hosts) == ([0, 1, 2], ["node0", "node1", "node2"])
    workers = open_run(tmp_path / "run").table(TABLES["workers"])
    assert workers.sort("rank")["host"].to_list() == ["node2", "node0", "node1"]


def test_a_damaged_cut_or_idle_profile_is_one_line(tmp_path):
    content = gpu_profile(0, 3)
    path = tmp_path / "cut.xplane.pb"
    for damaged in (content[: len(content) // 2], content[:40] + b"\xff" * 40 + content[80:]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"cut\.xplane\.pb: damaged or cut profile of XLA; copy"):
            XPLANE.read(path)
    host = Plane("/host:CPU")
    host.line("python", ("load", 5, 10))
    with pytest.raises(InputError, match="no work of a GPU or TPU in it; record"):
        read(tmp_path, host)


def test_other_files_of_protocol_buffers_are_not_taken_for_profiles():
    assert not xspace.is_xspace(b"")
    assert not xspace.is_xspace(b"\n\x10\n\x0ejit_train_step.7")
    kernel = {"cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0, "args": {"stream": 7, "device": 0}}
    trace = pftrace([kernel], 5)
    assert not xspace.is_xspace(trace)
    assert (
        why_passed_over(Path("file"), b"\n\x10\n\x0ejit_train_step.7").reason == "files that are not traces"
    )


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(gpu_profile(0, 1))
    xspace._messages.cache_clear()
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("google.protobuf"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match="perfetto"):
        XPLANE.read(path)
    monkeypatch.undo()
    assert rows(XPLANE.read(path))


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("all-reduce.17", "all_reduce"),
        ("reduce-scatter-done", "reduce_scatter"),
        ("collective-permute-start.2", "send_recv"),
        ("ragged-all-to-all", "all_to_all"),
    ],
)
def test_names_of_instructions_say_what_they_exchange(name, op):
    assert (classify(name).kind, classify(name).op) == ("communication", op)
    assert classify(f"{name}_fusion").kind != "communication"
    assert (classify("dot.3").kind, classify("loop_add_fusion_3").kind) == ("gemm", "elementwise")


def launches(count: int) -> Plane:
    """A host that launches this many kernels a step, and is slower than the device."""
    host = Plane("/host:CPU")
    marks = [("train", 100_000 * at, 99_000, {"step_num": at}) for at in range(4)]
    calls = [
        ("cuLaunchKernel", 100_000 * at + 900 * launch, 800, {"correlation_id": 1000 * at + launch + 1})
        for at in range(4)
        for launch in range(count)
    ]
    host.line("python", *marks, *calls, number=11)
    return host


def kernels(count: int) -> Plane:
    """What it launches: pointwise kernels, matmuls in FP32 and unfused softmax."""
    names = ("elementwise_add", "ampere_sgemm_128x64_nn", "softmax_warp_forward<float>", "elementwise_mul")
    device = Plane("/device:GPU:0")
    device.line(
        "Stream #7(Compute)",
        *(
            (
                names[launch % 4],
                100_000 * at + 900 * launch + 850,
                700,
                {"correlation_id": 1000 * at + launch + 1},
            )
            for at in range(4)
            for launch in range(count)
        ),
    )
    return device


def test_nothing_of_pytorch_is_advised_or_answered(tmp_path, empty_cache):
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(profile(launches(100), kernels(100)))
    import_sources([path], tmp_path / "run")
    analysis = Analysis(open_run(tmp_path / "run"))
    verdict = explain(analysis)
    said = " ".join([advice.do for advice in [*verdict.advice, *filter(None, [verdict.then])]])
    assert "torch" not in said.lower()
    assert "autocast" not in said
    facts = JobFacts(analysis, ReplayedJob(analysis.built.predictive))
    ways = [advice.do for limit in LIMIT_OF.values() for advice in advise(facts, limit)]
    assert not [way for way in ways if "torch" in way.lower() or "autocast" in way]
    with pytest.raises(Unanswerable, match="it changes programs of PyTorch, and XLA compiled this one"):
        facts.predict("compile")
    assert facts.predict("cpu:factor=2").speedup > 1
    _, unknown = inputs_of_step(analysis)
    assert unknown == "XLA profiles do not show what a step computes on"
    lacks = "a tool that has it, since XPlane traces lack it"
    assert how_to_record(SHAPES, analysis.run) == lacks


def test_every_edit_whose_way_is_pytorchs_says_so():
    ways = {
        kind.name: parse_edit(kind.example).how()
        for kind in all_kinds()
        if not kind.of_torch and "not a remedy" not in parse_edit(kind.example).how()
    }
    assert not {name for name, way in ways.items() if re.search(r"torch|DataLoader|FSDP|no_sync", way)}
