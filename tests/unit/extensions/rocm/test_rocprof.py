"""Files of rocprof before version 3, as small CSVs and JSON made here with its columns."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import InputError
from dpro.extensions.rocm.importers import ROCPROF
from dpro.extensions.rocm.rocprof import read_rocprof
from dpro.ingest.formats import registry
from dpro.ingest.importer import import_sources
from dpro.schema import TABLES, conform

COLUMNS = ("Index", "KernelName", "gpu-id", "queue-id", "pid", "tid", "DispatchNs", "BeginNs", "EndNs")
GEMM = "gemm<1, 2>(int) [clone .kd]"


def row(name: str, begin: int, end: int, **more: Any) -> dict[str, Any]:
    where = {"Index": 0, "gpu-id": 2, "queue-id": 1, "pid": 10, "tid": 11, "DispatchNs": begin - 5}
    return {"KernelName": name, "BeginNs": begin, "EndNs": end} | where | more


def write_csv(path: Path, *rows: dict[str, Any]) -> Path:
    lines = [COLUMNS, *([row[name] for name in COLUMNS] for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines))
    return path


def write_json(path: Path, *rows: dict[str, Any]) -> Path:
    """Trace events whose arguments are texts, after an empty one, as rocprof writes them."""
    named = {"ph": "M", "name": "process_name", "pid": 6, "args": {"name": "GPU0"}}
    texts = [{key: str(value) for key, value in row.items()} for row in rows]
    events = [{"ph": "X", "name": "kernel", "pid": 8, "ts": "1", "dur": "1", "args": args} for args in texts]
    path.write_text(json.dumps({"traceEvents": [{}, named, *events], "otherData": {}}))
    return path


def spans(path: Path) -> list[dict[str, Any]]:
    (trace,) = read_rocprof(path)
    return conform(TABLES["spans"], trace.frames["spans"]).to_dicts()


@pytest.mark.parametrize(("name", "write"), [("results.csv", write_csv), ("results.json", write_json)])
def test_a_kernel_has_its_name_gpu_queue_and_time(tmp_path, name, write):
    rows = (row(GEMM, 130, 190), row("copyBuffer.kd", 200, 230, **{"queue-id": 3}))
    path = write(tmp_path / name, *rows)
    assert registry().find(path.read_bytes()) is ROCPROF
    gemm, copied = spans(path)
    assert (gemm["name"], gemm["kind"], gemm["device"], gemm["stream"]) == ("gemm<1, 2>(int)", "kernel", 2, 0)
    assert (gemm["start_ns"], gemm["duration_ns"]) == (130, 60)
    assert (copied["name"], copied["stream"]) == ("copyBuffer", 1)


def test_json_beside_the_csv_of_its_run_is_left_out_with_a_line(tmp_path):
    folder = tmp_path / "in"
    write_csv(folder / "results.csv", row(GEMM, 130, 190))
    beside = write_json(folder / "results.json", row(GEMM, 130, 190))
    manifest = import_sources([folder], tmp_path / "run", jobs=1)
    assert manifest.ranks == [0]
    left = [line for line in manifest.warnings if "left out" in line]
    assert left == [f"left out: {beside}: the same kernels are in results.csv"]
    assert read_rocprof(beside) == []


def test_another_json_beside_a_csv_of_rocprof_is_none_of_its_files(tmp_path):
    write_csv(tmp_path / "results.csv", row(GEMM, 130, 190))
    (tmp_path / "results.json").write_text("{}")
    (trace,) = read_rocprof(tmp_path / "results.csv")
    assert not any("left out" in line for line in trace.warnings)


def test_processes_are_ranks_in_order_of_their_gpus(tmp_path):
    rows = [row("a", 1, 2, pid=10, **{"gpu-id": 3}), row("b", 1, 2, pid=20, **{"gpu-id": 1})]
    traces = read_rocprof(write_csv(tmp_path / "results.csv", *rows))
    assert [trace.frames["workers"]["pid"][0] for trace in traces] == [20, 10]


def test_calls_in_json_are_counted_and_launches_are_said_to_be_unknown(tmp_path):
    called = {"Name": "hipLaunchKernel", "BeginNs": 100, "EndNs": 110}
    (trace,) = read_rocprof(write_json(tmp_path / "results.json", row(GEMM, 130, 190), called))
    assert trace.skipped == {"spans of rocprof that are no kernels": 1}
    assert any("launches and copies are unknown" in line for line in trace.warnings)


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        ("results.csv", '"Index","KernelName","gpu-id"\n0,"gemm",2\n', "no GPU work in it; record the"),
        ("results.json", '{"traceEvents":[{"args":{"DispatchNs":"1"', "damaged JSON of rocprof"),
        ("results.json", '{"traceEvents":[{"args":{"DispatchNs":"\xff"}}]}', "damaged JSON of rocprof"),
        ("results.json", '{"traceEvents":[{"args":{"DispatchNs":"1","KernelName":"a"}}]}', "no GPU work"),
    ],
)
def test_files_without_times_and_damaged_ones_are_refused_in_one_line(tmp_path, name, content, refused):
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=refused) as error:
        read_rocprof(path)
    assert "\n" not in str(error.value)


def test_kernels_whose_times_are_all_impossible_are_refused(tmp_path):
    rows = [row(GEMM, begin, 17 * 10**17) for begin in (17 * 10**16, 17 * 10**16 + 1)]
    with pytest.raises(InputError, match="no span has a possible time"):
        read_rocprof(write_csv(tmp_path / "results.csv", *rows))


def test_a_row_that_was_cut_short_is_counted(tmp_path):
    path = write_csv(tmp_path / "results.csv", row(GEMM, 130, 190))
    path.write_text(path.read_text() + '1,"gem')
    (trace,) = read_rocprof(path)
    assert (trace.frames["spans"].height, trace.skipped) == (1, {"spans without an end": 1})


def test_archives_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as packed:
        packed.write(write_csv(tmp_path / "in" / "results.csv", row(GEMM, 130, 190)), "results.csv")
    with pytest.raises(InputError, match=r"all\.zip!results\.csv: unpack the archive"):
        import_sources([tmp_path / "all.zip"], tmp_path / "run", jobs=1)
