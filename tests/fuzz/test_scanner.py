"""The compiled scanner against the typed decoder on thousands of mangled traces."""

from __future__ import annotations

import json
import os
from random import Random

import pytest

from dpro.ingest.reading import files
from tests.fuzz.mutate import ODD_TEXTS, ODD_VALUES
from tests.scanned import differences
from tests.traces import annotation, cpu_op, event, kernel, launch

NUMBER = 1000 * int(os.environ.get("DPRO_FUZZ", "1"))
EVENTS = [
    cpu_op(
        "aten::mm",
        10.125,
        30,
        **{"External id": 4, "Input Dims": [[2, 3], []], "Concrete Inputs": ["", "[1, 2]"]},
    ),
    launch(15, 5, 1),
    kernel("gemm_kernel", 25, 10.5, 1),
    annotation("nccl:all_reduce", 50, 20),
    kernel(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)",
        65,
        40,
        2,
        **{"In msg nelems": 64, "Process Group Ranks": "[0, 1]"},
    ),
    {
        "ph": "i",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": 3.5,
        "args": {"Device Type": 1, "Total Allocated": 512},
    },
    {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "ts": 1, "args": {"labels": "GPU 3"}},
    {"ph": "s", "id": 3, "pid": 1, "tid": 2, "ts": 1, "cat": "ac2g", "name": "ac2g", "bp": "e"},
    event("cuda_sync", "Stream Sync", 40, 2, stream="7", wait_on_stream=7, device=None),
    {"ph": "B", "name": "r\u00e4nge", "pid": 10, "tid": 11, "ts": 12},
    {"ph": "E", "name": "r\u00e4nge", "pid": 10, "tid": 11, "ts": 33},
]


def mangled(number: int) -> bytes:
    """A trace that differs from a right one in some bytes, or in some values."""
    random = Random(number)
    events = [dict(random.choice(EVENTS)) for _ in range(random.randint(2, 30))]
    for _ in range(random.randint(0, 2)):
        chosen = random.choice(events)
        args = chosen.get("args")
        chosen["args"] = dict(args) if isinstance(args, dict) else {}
        target = random.choice([chosen, chosen["args"]])
        target[random.choice([*target, "dur", "stream", "Input Dims"])] = random.choice(ODD_VALUES)
    how = {"indent": random.choice([None, None, 1]), "ensure_ascii": random.random() < 0.3}
    text = bytearray(
        json.dumps({"traceEvents": events, "host_name": "h"}, **how).encode(errors="surrogatepass")
    )
    for _ in range(random.choice([0, 1, 1, 1, 2, 5])):
        place = random.randrange(len(text))
        match random.randrange(4):
            case 0:
                text[place] = random.randrange(256)
            case 1:
                del text[place : place + random.choice([1, 1, 3, 40])]
            case 2:
                text[place:place] = random.choice(ODD_TEXTS)
            case 3:
                text[place:place] = text[place : place + random.randint(1, 60)]
    return bytes(text)


@pytest.mark.slow
def test_both_ways_read_the_same_of_mangled_traces(tmp_path, monkeypatch):
    path = tmp_path / "rank0.json"
    for number in range(NUMBER):
        path.write_bytes(mangled(number))
        monkeypatch.setattr(files, "_BLOCK_BYTES", Random(number).choice([300, 1000, 1 << 19]))
        assert differences(path) == [], number
