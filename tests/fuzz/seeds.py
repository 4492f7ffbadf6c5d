"""Small files of every format dpro imports, made here: of a rank, with this many rows.

Tests hold every importer to them (`tests/unit/ingest/test_every_format.py`), and the fuzzer begins with them.
A new format needs an entry in `SEEDS`.
"""

from __future__ import annotations

import io
import json
import pickle
import sqlite3
from collections.abc import Callable
from typing import Any

import polars as pl

from tests.execution_traces import ROOTS, node
from tests.perfetto_traces import pftrace
from tests.xplane_profiles import gpu_profile

BEGIN_NS = 1_700_000_000_000_000_000
RANKS = 2
Rows = list[dict[str, Any]]


def kineto(rank: int, rows: int) -> bytes:
    events: Rows = []
    for number in range(rows):
        at, launch = 100.0 * number, {"correlation": number + 1}
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)" if number % 2 else "gemm_kernel"
        facts = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "dtype": "Float"}
        facts |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": number}
        where = {"device": 0, "stream": 7, **launch}
        events += [
            _event("cpu_op", "aten::mm", at, 50, **{"External id": number, "Input Dims": [[2, 3], [3, 2]]}),
            _event("cuda_runtime", "cudaLaunchKernel", at + 5, 3, **launch),
            _event("kernel", name, at + 20, 30, **where, **(facts if number % 2 else {})),
            _event("user_annotation", f"ProfilerStep#{number}", at, 90),
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "pid": 10, "tid": 10,
             "args": {"Total Allocated": 10, "Total Reserved": 20, "Device Type": 1, "Device Id": 0}},
        ]  # fmt: skip
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]
    distributed = {"backend": "nccl", "rank": rank, "world_size": RANKS, "pg_config": groups}
    document = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H100"}], "host_name": "node0"}
    document |= {"distributedInfo": distributed, "baseTimeNanoseconds": BEGIN_NS, "traceEvents": events}
    return json.dumps(document).encode()


def _event(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    where = {"pid": 0, "tid": 7} if category == "kernel" else {"pid": 10, "tid": 10}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, **where, "args": args}


def perfetto(rank: int, rows: int) -> bytes:
    events = json.loads(kineto(rank, rows))["traceEvents"]
    return pftrace([event for event in events if event["ph"] == "X"], BEGIN_NS)


def nsys(rank: int, rows: int) -> bytes:
    texts = ["gemm", "cudaLaunchKernel_v7000", f"rank {rank}", "cudaEventRecord_v3020"]
    thread = (1 << 48) | (10 << 24) | 10
    process = (1 << 48) | (10 << 24)
    tables: dict[str, Rows] = {
        "StringIds": [{"id": number, "value": text} for number, text in enumerate(texts, 1)],
        "META_DATA_EXPORT": [{"name": "EXPORT_PRODUCT_VERSION", "value": "2026.2.1"}],
        "TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": BEGIN_NS}],
        "TARGET_INFO_GPU": [{"id": 0, "name": "H100", "uuid": "GPU-0"}],
        "CUPTI_ACTIVITY_KIND_KERNEL": [],
        "CUPTI_ACTIVITY_KIND_RUNTIME": [],
        "CUPTI_ACTIVITY_KIND_MEMCPY": [],
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": [],
        "NVTX_EVENTS": [],
    }
    for number in range(rows):
        at = 1000 * number
        on_gpu = {"deviceId": 0, "streamId": 7, "correlationId": number, "globalPid": process}
        kernel = {"start": at + 300, "end": at + 700, "demangledName": 1, "shortName": 1, **on_gpu}
        call = {"start": at + 100, "end": at + 200, "globalTid": thread, "nameId": 2, "correlationId": number}
        copy = {"start": at + 800, "end": at + 900, "bytes": 64, "copyKind": 1, "srcKind": 1, "dstKind": 2}
        marked = {"start": at, "end": at + 990, "globalTid": thread, "eventType": 59, "domainId": 0}
        tables["CUPTI_ACTIVITY_KIND_KERNEL"].append(kernel)
        tables["CUPTI_ACTIVITY_KIND_RUNTIME"].append(call)
        tables["CUPTI_ACTIVITY_KIND_MEMCPY"].append(copy | on_gpu)
        tables["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"].append(
            {"start": at + 910, "end": at + 950, "syncType": 3, "eventId": 4, **on_gpu}
        )
        tables["NVTX_EVENTS"].append(marked | {"text": f"step {number}", "textId": None, "jsonText": None})
    return database(tables)


def rpd(rank: int, rows: int) -> bytes:
    texts = ["", "gemm", "hipLaunchKernel", "KernelExecution", "UserMarker", "step"]
    tables: dict[str, Rows] = {
        "rocpd_string": [{"id": number, "string": text} for number, text in enumerate(texts, 1)],
        "rocpd_metadata": [{"tag": "schema_version", "value": "2"}],
        **{
            name: []
            for name in ("rocpd_op", "rocpd_api", "rocpd_api_ops", "rocpd_copyapi", "rocpd_kernelapi")
        },
    }
    for number in range(rows):
        at = BEGIN_NS + 1000 * number
        call = {"id": 2 * number + 1, "pid": 10, "tid": 10, "start": at + 100, "end": at + 200}
        marked = {"id": 2 * number + 2, "start": at, "end": at + 990, "apiName_id": 5, "args_id": 6}
        op = {"id": number + 1, "gpuId": 0, "queueId": 0, "start": at + 300, "end": at + 700}
        tables["rocpd_api"] += [call | {"apiName_id": 3, "args_id": 1}, call | marked]
        tables["rocpd_op"].append(op | {"description_id": 2, "opType_id": 4})
        tables["rocpd_api_ops"].append({"id": number + 1, "api_id": call["id"], "op_id": op["id"]})
        tables["rocpd_kernelapi"].append({"api_ptr_id": call["id"], "stream": "0x0"})
    return database(tables)


def rocprofv3(rank: int, rows: int) -> bytes:
    lines = ['"Kind","Agent_Id","Stream_Id","Thread_Id","Kernel_Name","Correlation_Id","Start_Timestamp"']
    lines[0] += ',"End_Timestamp"'
    for number in range(rows):
        at = BEGIN_NS + 1000 * number
        lines.append(f'"KERNEL_DISPATCH","Agent 4","0","10","gemm<1, 2>","{number}","{at}","{at + 400}"')
    return "\n".join([*lines, ""]).encode()


def rocprof(rank: int, rows: int) -> bytes:
    lines = ['"Index","KernelName","gpu-id","queue-id","pid","tid","DispatchNs","BeginNs","EndNs"']
    for number in range(rows):
        at = BEGIN_NS + 1000 * number
        lines.append(f'{number},"gemm<1, 2>(int) [clone .kd]",{rank},0,10,10,{at - 50},{at},{at + 400}')
    return "\n".join([*lines, ""]).encode()


def rocprof_json(rank: int, rows: int) -> bytes:
    events: Rows = [{}]
    for number in range(rows):
        at = BEGIN_NS + 1000 * number
        times = {"DispatchNs": str(at - 50), "BeginNs": str(at), "EndNs": str(at + 400)}
        named = {"KernelName": "gemm.kd", "gpu-id": str(rank), "queue-id": "0", "pid": "10"}
        events.append({"ph": "X", "name": "gemm.kd", "pid": 8, "tid": 10, "args": named | times})
    machine = {"HSASystemAttributes.MachineModel": "LARGE"}
    return json.dumps({"traceEvents": events, "otherData": machine}).encode()


def database(tables: dict[str, Rows]) -> bytes:
    with sqlite3.connect(":memory:") as connection:
        for name, of_table in tables.items():
            columns = list(of_table[0]) if of_table else ["start", "end"]
            quoted, marks = (", ".join(each) for each in ([f'"{c}"' for c in columns], "?" * len(columns)))
            connection.execute(f"CREATE TABLE {name} ({quoted})")
            values = [[row[column] for column in columns] for row in of_table]
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", values)
        connection.commit()
        return connection.serialize()


def oplevel(rank: int, rows: int) -> bytes:
    schema = {"dp_rank": pl.Int8, "stage": pl.Int8, "rank": pl.Int16, "step": pl.Int64, "optype": pl.String}
    schema |= {"start_ts": pl.Float32, "duration": pl.Float32, "seq_id": pl.Int32, "mb_id": pl.Int8}
    ops = ("forward-compute", "forward-send", "backward-compute", "grads-reduce-scatter")
    columns = [
        (0, rank, rank, number // 4, ops[number % 4], 0.1 * number, 0.05, number, number)
        for number in range(rows)
    ]
    file = io.BytesIO()
    pl.DataFrame(columns, schema=schema, orient="row").write_parquet(file)
    return file.getvalue()


def _dump(rank: int, rows: int) -> dict[str, Any]:
    entries = [
        {
            "record_id": number,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number + 1,
            "p2p_seq_id": 0,
            "op_id": number,
            "profiling_name": "nccl:all_reduce" if number % 3 else f"nccl:send {rank}->{1 - rank}",
            "time_created_ns": BEGIN_NS + number,
            "input_sizes": [[2, 3]],
            "input_dtypes": ["Float"],
            "output_sizes": [[2, 3]],
            "output_dtypes": ["Float"],
            "state": "completed" if number + 1 < rows else "scheduled",
            "retired": number + 1 < rows,
            "timeout_ms": 600000,
            "is_p2p": not number % 3,
            "frames": [],
        }
        for number in range(rows)
    ]
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    status = {
        "last_enqueued_collective": rows,
        "last_started_collective": rows,
        "last_completed_collective": 0,
    }
    facts = {
        "version": "2.9",
        "nccl_version": "2.27.3",
        "pg_config": {"0": group},
        "pg_status": {"0": status},
    }
    return facts | {"entries": entries}


def flight_pickle(rank: int, rows: int) -> bytes:
    return pickle.dumps(_dump(rank, rows), 2)


def flight_json(rank: int, rows: int) -> bytes:
    return json.dumps(_dump(rank, rows), sort_keys=True).encode()


def inspector(rank: int, rows: int) -> bytes:
    whose = {
        "header": {"id": "0xabc", "rank": rank, "n_ranks": RANKS, "nnodes": 1},
        "metadata": {"inspector_output_format_version": "v4.0", "hostname": "node0", "pid": 100 + rank},
    }
    lines: Rows = [whose | {"dump_stats": {"coll_dropped_since_last_dump": 0}}]
    for number in range(rows):
        times = {"coll_start_ts": 1_700_000_000_000_000 + number, "kernel_events": [{"kernel_start_ts": 5}]}
        coll = {"coll": "AllReduce", "coll_sn": number, "coll_msg_size_bytes": 64, "coll_exec_time_us": 250}
        lines.append(whose | {"coll_perf": coll | {"coll_algo": "RING", "event_trace_ts": times}})
        stamps = {"send_wait_ts": 100 + number, "proxy_step_stop_ts": 150 + number}
        proxy = {"record_type": "proxy_op", "parent_sn": number, "proxy_op_sn": number, "direction": "send"}
        proxy |= {"peer": 1 - rank, "channel_id": 0, "n_steps": 1, "n_steps_dropped": 0}
        proxy |= {"steps": [{"trans_size_bytes": 64, "event_trace_ts": stamps}]}
        lines.append(whose | {"proxy_trace": proxy})
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def ras(rank: int, rows: int) -> bytes:
    well = {"init_state": 0, "async_error": 0, "abort_flag": False}
    members = [
        {"rank": number, "host": "10.0.0.1", "pid": 100 + number, "cuda_dev": 0, "nvml_dev": number,
         "status": well, "collective_counts": {"AllReduce": 11 + number}}
        for number in range(rows)
    ]  # fmt: skip
    communicator = {"hash": "0xae94", "size": rows, "ranks_count": rows, "ranks": members}
    document = {"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [communicator]}
    return json.dumps(document, indent=2).encode()


def execution_trace(rank: int, rows: int) -> bytes:
    timed = {"ts": 10.5, "dur": 4}
    nodes = [
        node(number + 3, f"aten::op{number}", reads=(number + 5,), writes=(number + 6,))
        | {"ts": 10.5 * (number + 1), "dur": 4}
        for number in range(rows)
    ]
    roots = [root | timed for root in ROOTS]
    return json.dumps({"schema": "1.0.1", "pid": 10 + rank, "nodes": [*nodes, *roots]}).encode()


def primus(rank: int, rows: int) -> bytes:
    names = ("fwd_start", "fwd_end", "bwd_start", "bwd_end")
    times = {name: [10.0 * number + place for number in range(rows)] for place, name in enumerate(names)}
    return json.dumps({str(step): {**times, "total": 10.0 * rows + 5} for step in range(2)}).encode()


def megatron(rank: int, rows: int) -> bytes:
    facts = {"microbatch": 0, "model_chunk": 0, "pp_rank": rank}
    events: Rows = [{"name": "iteration", "ph": "B", "pad_before": 0}]
    for number in range(rows):
        events += [
            {"name": "forward", "ph": "B", "rel_ts": 10 * number},
            {"name": "forward", "ph": "E", "rel_ts": 10 * number + 5} | facts | {"microbatch": number},
        ]
    end = {"name": "iteration", "ph": "E", "rel_ts": 10 * rows + 9, "duration_wall": 10 * rows + 9} | facts
    return json.dumps([*events, end]).encode()


# "format" or "format (variant)": (rank, rows) -> the file. Formats are called as in `dpro.ingest.formats`.
SEEDS: dict[str, Callable[[int, int], bytes]] = {
    "kineto": kineto,
    "Perfetto": perfetto,
    "nsys": nsys,
    "rocmProfileData": rpd,
    "rocprof (CSV)": rocprof,
    "rocprof (JSON)": rocprof_json,
    "rocprofv3": rocprofv3,
    "XPlane": gpu_profile,
    "op-level parquet": oplevel,
    "flight recorder (pickle)": flight_pickle,
    "flight recorder (JSON)": flight_json,
    "NCCL Inspector": inspector,
    "NCCL RAS": ras,
    "execution trace": execution_trace,
    "pipeline timeline (Primus)": primus,
    "pipeline timeline (MegatronApp)": megatron,
}


def format_of(seed: str) -> str:
    """The format that a seed is of."""
    return seed.partition(" (")[0]
