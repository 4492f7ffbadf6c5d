"""Hand-written execution traces for tests: one function per sort of node, in every schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dpro.ingest.trace import RankTrace
from dpro.schema import TABLES, conform

Fields = dict[str, Any]
FLOAT = "Tensor(float)"


def tensor(number: int) -> list[Any]:
    """A tensor as the observer writes it: id, storage, offset, elements, size of one, device."""
    return [number, 100 + number, 0, 16, 4, "cuda:0"]


def node(
    number: int,
    name: str,
    parent: int = 2,
    *,
    reads: tuple[int, ...] = (),
    writes: tuple[int, ...] = (),
    tid: int = 1,
    scope: int = 0,
    **more: Any,
) -> Fields:
    """An operator of schema 1.0.1; ids begin at 3, and the record function's number is the id minus 2."""
    return {
        "name": name,
        "id": number,
        "rf_id": number - 2,
        "parent": parent,
        "fw_parent": 0,
        "seq_id": -1,
        "scope": scope,
        "tid": tid,
        "fw_tid": 0,
        "op_schema": "",
        "inputs": [*map(tensor, reads), 1.5],
        "input_shapes": [[4, 4]] * len(reads) + [[]],
        "input_types": [FLOAT] * len(reads) + ["Double"],
        "outputs": list(map(tensor, writes)),
        "output_shapes": [[4, 4]] * len(writes),
        "output_types": [FLOAT] * len(writes),
        **more,
    }


ROOTS = (
    node(1, "[pytorch|profiler|execution_trace|process]", 1, scope=7, tid=0) | {"rf_id": 0},
    node(2, "[pytorch|profiler|execution_trace|thread]", 1, scope=7) | {"rf_id": 0},
)
# A layer: a transposed weight (tensor 5 seen as 6) times an input (7) gives 8, which a relu reads.
LAYER = (
    node(3, "aten::linear", reads=(7, 5), writes=(8,)),
    node(4, "aten::t", 3, reads=(5,), writes=(6,)),
    node(5, "aten::transpose", 4, reads=(5,), writes=(6,)),
    node(6, "aten::mm", 3, reads=(7, 6), writes=(8,)),
    node(7, "block", scope=7),
    node(8, "aten::relu", 7, reads=(8,), writes=(9,)),
)


def chakra(flat: Fields, version: str) -> Fields:
    """A node of schema 1.0.1 as Chakra's schemas write it."""
    attributes = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema")
    added = {
        "1.1.0": ("kernel_backend", "kernel_file"),
        "1.1.1": ("kernel_backend", "kernel_file", "tensor_range"),
    }
    extra = added.get(version.split("-")[0], ())

    def values(way: str) -> Fields:
        fields = {"values": flat[f"{way}s"], "shapes": flat[f"{way}_shapes"], "types": flat[f"{way}_types"]}
        return fields | ({"strides": []} if version.startswith("1.1.1") else {})

    rest = {key: value for key, value in flat.items() if key in ("ts", "dur", "inclusive_dur", "cat", "args")}
    return {
        "id": flat["id"],
        "name": flat["name"],
        "ctrl_deps": flat["parent"],
        "inputs": values("input"),
        "outputs": values("output"),
        "attrs": [
            *({"name": name, "type": "uint64", "value": flat[name]} for name in attributes),
            *({"name": name, "type": "string", "value": ""} for name in extra),
        ],
        **rest,
    }


def trace_file(path: Path, *nodes: Fields, schema: str = "1.0.1", pid: int = 10) -> Path:
    """A trace as the observer writes it: nodes in the order in which they ended."""
    ended = sorted(nodes, key=lambda each: -each["id"])
    written = [each if schema == "1.0.1" else chakra(each, schema) for each in (*ended, *ROOTS)]
    document = {
        "schema": schema,
        "pid": pid,
        "time": "2023-07-12 12:47:27",
        "start_ts": 69838573,
        "nodes": written,
    }
    path.write_text(json.dumps(document))
    return path


def stored(trace: RankTrace) -> RankTrace:
    """The trace as it is after its tables were on disk."""
    frames = {name: conform(TABLES[name], frame) for name, frame in trace.frames.items()}
    return RankTrace(trace.rank, trace.world_size, frames)


def needs(trace: RankTrace, kind: str) -> set[tuple[str, str]]:
    """Dependencies of a kind, as (source, target) by the names of their spans."""
    names = dict(trace.frames["spans"].select("span_id", "name").iter_rows())
    rows = conform(TABLES["dependencies"], trace.frames["dependencies"]).filter(kind=kind)
    pairs = rows.select("source_span_id", "target_span_id").rows()
    return {(names[source], names[target]) for source, target in pairs}


SCHEMAS = ("1.0.1", "1.0.2-chakra.0.0.4", "1.0.3-chakra.0.0.4", "1.1.0-chakra.0.0.4", "1.1.1-chakra.0.0.4")
