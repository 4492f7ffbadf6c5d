"""Files of rocprofv3, as small CSVs made here with the columns of several versions."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dpro.errors import InputError
from dpro.extensions.rocm.importers import ROCPROFV3
from dpro.extensions.rocm.rocprofv3 import read_rocprofv3
from dpro.ingest.formats import registry
from dpro.ingest.importer import import_sources
from dpro.schema import TABLES, conform

_CALL = (
    "Domain",
    "Function",
    "Process_Id",
    "Thread_Id",
    "Correlation_Id",
    "Start_Timestamp",
    "End_Timestamp",
)
_KERNEL = (
    *("Kind", "Agent_Id", "Queue_Id", "Stream_Id", "Thread_Id", "Dispatch_Id", "Kernel_Id", "Kernel_Name"),
    *("Correlation_Id", "Start_Timestamp", "End_Timestamp", "LDS_Block_Size"),
)
_OLD_KERNEL = tuple(name for name in _KERNEL if name not in ("Stream_Id", "Thread_Id", "Dispatch_Id"))
_COPY = ("Kind", "Direction", "Source_Agent_Id", "Destination_Agent_Id")
_COPY += ("Correlation_Id", "Start_Timestamp", "End_Timestamp")


def write(path: Path, columns: tuple[str, ...], *rows: dict[str, Any]) -> Path:
    """One CSV, quoted as rocprofv3 quotes; a cell that a row does not name is 0."""
    lines = [columns, *([row.get(name, 0) for name in columns] for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(",".join(f'"{cell}"' for cell in line) + "\n" for line in lines))
    return path


def call(name: str, start: int, end: int, number: int, **more: Any) -> dict[str, Any]:
    times = {"Correlation_Id": number, "Start_Timestamp": start, "End_Timestamp": end}
    return {"Function": name, "Process_Id": 10, "Thread_Id": 11} | times | more


def kernel(name: str, start: int, end: int, number: int, **more: Any) -> dict[str, Any]:
    where = {"Agent_Id": "Agent 4", "Queue_Id": 1, "Stream_Id": 2}
    return call("", start, end, number, Kernel_Name=name) | where | more


def spans(path: Path) -> dict[str, dict[str, Any]]:
    """Spans of the only rank by name."""
    (trace,) = read_rocprofv3(path)
    frame = conform(TABLES["spans"], trace.frames["spans"])
    return {row["name"]: row for row in frame.iter_rows(named=True)}


@pytest.fixture
def recorded(tmp_path):
    """A kernel, and the call that launched it."""
    write(tmp_path / "job_hip_api_trace.csv", _CALL, call("hipLaunchKernel", 100, 110, 7))
    return write(tmp_path / "job_kernel_trace.csv", _KERNEL, kernel("gemm<int, 2>(int)", 130, 190, 7))


def test_a_kernel_has_its_agent_its_stream_and_the_call_that_launched_it(recorded):
    found = spans(recorded)
    launch, gemm = found["hipLaunchKernel"], found["gemm<int, 2>(int)"]
    assert (launch["kind"], launch["pid"], launch["tid"]) == ("runtime", 10, 11)
    assert (gemm["kind"], gemm["device"], gemm["stream"], gemm["tid"]) == ("kernel", 4, 0, -1)
    assert (gemm["start_ns"], gemm["duration_ns"]) == (130, 60)
    assert gemm["correlation"] == launch["correlation"] == 7


def test_older_versions_have_agents_as_numbers_and_queues_alone(tmp_path):
    rows = [kernel(f"on {queue}", 130, 190, queue, Agent_Id=1, Queue_Id=queue) for queue in (2, 10)]
    found = spans(write(tmp_path / "kernel_trace.csv", _OLD_KERNEL, *rows))
    assert [(row["device"], row["stream"]) for row in found.values()] == [(1, 0), (1, 1)]


def test_copies_are_on_the_agent_that_is_no_host_and_one_direction_does_not_wait_for_the_other(recorded):
    copies = [
        call("", 200, 300, 0, Direction=direction, Source_Agent_Id=source, Destination_Agent_Id=target)
        for direction, source, target in (
            ("MEMORY_COPY_HOST_TO_DEVICE", "Agent 0", "Agent 4"),
            ("MEMORY_COPY_DEVICE_TO_HOST", "Agent 4", "Agent 0"),
        )
    ]
    write(recorded.with_name("job_memory_copy_trace.csv"), _COPY, *copies)
    found = spans(recorded)
    into, out = found["CopyHostToDevice"], found["CopyDeviceToHost"]
    assert (into["kind"], into["device"], into["correlation"], into["bytes"]) == ("memcpy", 4, -1, -1)
    assert out["device"] == 4
    assert len({into["stream"], out["stream"], found["gemm<int, 2>(int)"]["stream"]}) == 3


def test_ranges_are_annotations_whatever_they_are_called_and_operators_where_torch_emitted_them(recorded):
    ranges = [call("hipMemcpy", 10, 90, 1), call("aten::mm, seq = 41, op_id = 9", 10, 90, 2)]
    write(recorded.with_name("job_marker_api_trace.csv"), _CALL, *ranges)
    write(recorded.with_name("job_rccl_api_trace.csv"), _CALL, call("ncclAllReduce", 95, 120, 3))
    found = spans(recorded)
    assert found["hipMemcpy"]["kind"] == found["ncclAllReduce"]["kind"] == "annotation"
    assert (found["aten::mm"]["kind"], found["aten::mm"]["sequence_number"]) == ("cpu_op", 41)


def test_a_kernel_of_rccl_is_the_collective_that_the_call_around_its_launch_names(recorded):
    write(recorded, _KERNEL, kernel("ncclDevKernel_Generic_1(ncclDevKernelArgs)", 130, 190, 7))
    write(recorded.with_name("job_rccl_api_trace.csv"), _CALL, call("ncclAllReduce", 95, 120, 3))
    (trace,) = read_rocprofv3(recorded)
    found = conform(TABLES["collectives"], trace.frames["collectives"])
    assert found.select("op", "start_ns", "source").rows() == [("all_reduce", 130, "rocprofv3 kernel")]


def test_the_model_of_gpus_is_known_where_all_are_of_one(recorded):
    agents = [
        {"Agent_Type": kind, "Product_Name": name} for kind, name in (("CPU", "EPYC"), ("GPU", "MI300X"))
    ]
    columns = ("Node_Id", "Logical_Node_Id", "Agent_Type", "Product_Name")
    write(recorded.with_name("job_agent_info.csv"), columns, *agents, agents[1])
    (trace,) = read_rocprofv3(recorded)
    assert trace.gpus == ["MI300X"] == trace.frames["workers"]["gpu_name"].to_list()


def test_graphs_without_ranges_are_no_batches_of_a_server(tmp_path):
    write(tmp_path / "job_hip_api_trace.csv", _CALL, call("hipGraphLaunch", 100, 110, 7))
    layers = [kernel("flash_attn", 130 + 60 * layer, 180 + 60 * layer, 7) for layer in range(3)]
    (trace,) = read_rocprofv3(write(tmp_path / "job_kernel_trace.csv", _KERNEL, *layers))
    assert trace.frames["iterations"].is_empty()


def test_a_folder_of_processes_has_a_rank_for_each_and_counts_nothing_as_passed_over(tmp_path):
    for rank in range(2):
        folder = tmp_path / "in" / "host"
        write(folder / f"rank{rank}_hip_api_trace.csv", _CALL, call("hipLaunchKernel", 100, 110, 7))
        write(folder / f"rank{rank}_kernel_trace.csv", _KERNEL, kernel("gemm", 130, 190 + rank, 7))
        (folder / f"rank{rank}_results.json").write_text('{"rocprofiler-sdk-tool": [{}]}')
    manifest = import_sources([tmp_path / "in"], tmp_path / "run", jobs=1)
    assert (manifest.ranks, manifest.warnings, manifest.skipped) == ([0, 1], [], {})


def test_calls_of_several_processes_make_a_rank_of_each(tmp_path):
    pairs = [(10, "Agent 5"), (20, "Agent 4")]
    launches = [call("hipLaunchKernel", 100, 110, 7, Process_Id=pid, Thread_Id=pid) for pid, _ in pairs]
    kernels = [kernel(f"of {pid}", 130, 190, 7, Thread_Id=pid, Agent_Id=agent) for pid, agent in pairs]
    write(tmp_path / "job_hip_api_trace.csv", _CALL, *launches)
    traces = read_rocprofv3(write(tmp_path / "job_kernel_trace.csv", _KERNEL, *kernels))
    assert [trace.frames["workers"]["pid"][0] for trace in traces] == [20, 10]
    assert [trace.frames["spans"]["name"].to_list()[1] for trace in traces] == ["of 20", "of 10"]


def test_what_is_beside_kernels_is_nothing_by_itself(recorded, tmp_path):
    calls = recorded.with_name("job_hip_api_trace.csv")
    assert registry().find(calls.read_bytes()) is ROCPROFV3
    assert read_rocprofv3(calls) == []
    with pytest.raises(InputError, match=r"job_hip_api_trace\.csv: cannot be used alone; give the folder"):
        import_sources([calls], tmp_path / "run", jobs=1)
    recorded.unlink()
    with pytest.raises(InputError, match=r"no kernel_trace\.csv beside it; record with `rocprofv3 --runtime"):
        read_rocprofv3(calls)


def test_what_is_lacking_is_one_warning(recorded):
    calls = recorded.with_name("job_hip_api_trace.csv")
    calls.write_bytes(gzip.compress(calls.read_bytes())[:40])
    (trace,) = read_rocprofv3(recorded)
    assert [warning.partition(":")[0] for warning in trace.warnings] == ["left out", recorded.name]
    assert "no HIP calls beside it" in trace.warnings[1]


def test_rows_that_are_cut_short_or_garbled_are_counted(recorded):
    whole = recorded.read_text()
    recorded.write_text(whole + "\n\n")
    assert read_rocprofv3(recorded)[0].skipped == {}
    for tail in (
        '"KERNEL_DISPATCH","Agent 4"\n',
        "\0" * 40,
        '"KERNEL_DISPATCH","Agent 4","1","2","0","0","0","ge',
    ):
        recorded.write_text(whole + tail)
        (trace,) = read_rocprofv3(recorded)
        assert trace.frames["spans"].height == 2
        assert trace.skipped == {"spans without an end": 1}
    recorded.write_text(whole + '"KERNEL_DISPATCH","Ag\n' + whole)
    with pytest.raises(InputError, match=r"job_kernel_trace\.csv: damaged CSV"):
        read_rocprofv3(recorded)


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ('"Kernel_Name","Start_Timestamp","Correlation_Id"\n', "no GPU work in it; record the job with"),
        ('"Kernel_Name,Start_Timestamp,Correlation_Id\n1,2,3\n', "CSV|columns"),
        ('{"rocprofiler-sdk-tool": [{}]}', "JSON of rocprofv3, which is not read; record with `rocprofv3"),
        (
            '"Counter_Value","Kernel_Name","Start_Timestamp","Correlation_Id"\n',
            "no kernel_trace.csv beside it",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, content, refused):
    path = tmp_path / "job_results.csv"
    path.write_text(content)
    assert registry().find(path.read_bytes()) is ROCPROFV3
    with pytest.raises(InputError, match=refused) as error:
        read_rocprofv3(path)
    assert "\n" not in str(error.value)


def test_processes_that_a_conversion_has_mixed_and_archives_are_refused(recorded, tmp_path):
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.write(recorded, recorded.name)
    with pytest.raises(InputError, match=r"all\.zip!job_kernel_trace\.csv: unpack the archive"):
        import_sources([archive], tmp_path / "run", jobs=1)
    rows = [kernel("gemm", 130, 190, 7, Guid=guid) for guid in ("a", "b")]
    write(recorded, ("Guid", *_KERNEL), *rows)
    with pytest.raises(InputError, match="2 databases in one file; convert each by itself"):
        read_rocprofv3(recorded)
