"""A copy of a run answers as the run does, and holds none of the names that its job gave."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.detect.findings import CodeLocation, Finding
from dpro.detect.findings_log import BEGINS, FindingsLog, Notice
from dpro.detect.observations import observe
from dpro.errors import UsageError
from dpro.extensions.scrub.scrub import NewNames, _deep, scrub
from dpro.schema import TABLES, WORKERS
from dpro.store import AppliedChange, ChangedPlace, Manifest, Run, open_run, write_manifest, write_part
from tests.builders import TinyRun
from tests.commands import dpro
from tests.jobs import COMPILER, record, script

SAMPLES = ("healthy", "slow_rank", "slow_input", "h200_gpt", "h200_hang", "h200_input")
COMMANDS = (["explain"], ["diagnose"], ["whatif", "--edit", "no-comm"], ["whatif", "--edit", "heal:rank=1"])
SECRETS = ("zebra", "Zebra", "10.77.", "alice", "fd00:77")


@pytest.fixture(scope="module")
def copies(repository, tmp_path_factory) -> dict[str, tuple[Path, Path, NewNames]]:
    """Each sample, its copy, and the names of that."""
    folder = tmp_path_factory.mktemp("copies")
    runs = {name: repository / "sample_traces" / name for name in SAMPLES}
    return {name: (run, folder / name, scrub(open_run(run), folder / name)) for name, run in runs.items()}


def answer(command: list[str], run: Path) -> tuple[int, Any, str]:
    done = dpro(command[0], run, *command[1:], "--json")
    text = done.stdout.replace(str(run), "RUN")
    return done.returncode, json.loads(text) if text else None, done.stderr.replace(str(run), "RUN")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_copy_answers_as_the_run_does_but_for_the_names(copies, name, command):
    run, copy, names = copies[name]
    expected, got = answer(command, run), answer(command, copy)
    assert got[0] == expected[0]
    assert _deep(got[1], names.mixed) == _deep(expected[1], names.mixed)
    assert names.mixed(got[2]) == names.mixed(expected[2])


@pytest.mark.parametrize("name", SAMPLES)
def test_all_that_is_no_name_is_the_same(copies, name):
    run, copy, _ = copies[name]
    for table in TABLES.values():
        numbers = [column for column, dtype in table.dtypes.items() if dtype != pl.String]
        plain = [column for column in numbers if not isinstance(table.dtypes[column], pl.List)]
        expected, got = (open_run(each).table(table).select(plain) for each in (run, copy))
        assert got.equals(expected)


def planted(folder: Path) -> Run:
    """A run with secret names wherever a job can give one."""
    tiny = TinyRun()
    tiny.op("aten::mm", 0, 10)
    tiny.mark("nn.Module: ZebraBlock_0", 0, 20)
    tiny.mark("zebra phase", 0, 30)
    for name in ("dpro::zebra_x", "ProfilerStep#9 zebra", "torch/zebra", "nccl:all_zebra", "Forward 1 zebra"):
        tiny.mark(name, 0, 30)
    tiny.mark("Optimizer.step#ZebraAdam.step", 31, 40)
    tiny.span("gpu_annotation", "FSDP::all_gather (zebra.0)", 0, 5, pid=1, tid=1)
    tiny.span("python", "/home/alice/zebra/train.py(12): zebra_step", 0, 30, pid=1, tid=1)
    for rank in (0, 1):
        tiny.rows["workers"].append({
            "rank": rank, "host": f"zebra-{rank}.corp", "error": "ValueError: zebra is not 7",
            "stack": "home/alice/zebra.py:7 zebra\ntorch/distributed/c10d.py:3 all_reduce",
        })  # fmt: skip
    rows = {
        "buckets": {"names": [["zebra.0.weight", "zebra.1.bias"]], "bucket": [0]},
        "model_calls": {"name": ["ZebraNet"]},
        "checkpoints": {"path": ["/scratch/alice/zebra/step1"]},
        "counters": {"host": ["zebra-1.corp"] * 3, "counter": ["tcp_sent"] * 3, "time_ns": [1, 2, 3],
                     "device": ["10.77.0.1:80>10.77.0.2:99", "fd00:77::1", "eth0"]},
        "collectives": {"group": ["0 zebra_group", "1 mesh_tp"], "op": ["all_reduce"] * 2},
    }  # fmt: skip
    for name, found in tiny.rows.items():
        write_part(folder, TABLES[name], "rank00000", pl.DataFrame(found))
    for name, columns in rows.items():
        table = TABLES[name]
        write_part(folder, table, "telemetry-00000-zebra-1.corp-77", pl.DataFrame(columns | {"rank": 0}))
    manifest = Manifest(
        world_size=2, ranks=[0, 1], created_by="dpro record 0.1.0", hosts=["zebra-0.corp", "zebra-1.corp"],
        command=["torchrun", "--zebra-mode", "/home/alice/zebra/train.py", "--layers", "8"],
        environment={"MASTER_ADDR": "10.77.0.1", "SLURM_JOB_NAME": "zebra", "NCCL_ALGO": "Ring",
                     "TORCH_LOGS": "/home/alice/logs"},
        options={"requests": ["/home/alice/zebra.jsonl"], "step": "zebra:train_step", "every": 7},
        error="RuntimeError: zebra exploded", unrecorded="zebra-1.corp: no torch",
        warnings=["rank 1 of zebra-1.corp: /home/alice/zebra/x.json is damaged",
                  "rank 0: its process replaced itself by another program: /bin/python -m zebra_tool --z"],
        applied=[AppliedChange("bucket:mb=25", 0, [ChangedPlace("/home/alice/zebra.py:7", "zebra", 1)], [])],
    )  # fmt: skip
    write_manifest(folder, manifest)
    log = FindingsLog(folder)
    finding = Finding("slow.host", "host", "zebra-1.corp", (1,), 0.1, 0.9, 1e6, (
        observe("late", "{hosts} are late", hosts="10.77.0.2 and 10.77.9.9"),
        observe("stack", "rank 1 is in {calls}", calls="/opt/alice/zebra2.py:7 zebra_wait < zebra/x.py:9 z"),
    ), place=CodeLocation("zebra_wait", "/opt/alice/zebra2.py", 7))  # fmt: skip
    log.write(Notice(BEGINS, 1, 5, 3, finding))
    return open_run(folder)


@pytest.mark.parametrize(
    "name",
    ["ProfilerStep#12", "dpro::backward", "nccl:_all_gather_base", "gloo:all_reduce", "nccl:send 0->1",
     "DistributedDataParallel.forward", "PP:3B0", "Forward 0", "Torch-Compiled Region: 0/1",
     "torch/nn/modules/module.py(1779): _call_impl", "dpro/collectors/inside/recorder.py(310): on_update"],
)  # fmt: skip
def test_names_that_pytorch_gives_stay(name):
    assert NewNames({}).of_span("annotation", name) == name


def test_that_a_function_is_built_in_stays_known():
    name, names = "<built-in method zebra of Zebra object at 0x7f137af5d690>", NewNames({})
    names.of_span("python", name)
    names.settle()
    renamed = names.of_span("python", name)
    assert re.fullmatch(r"<built-in method x\d+ of x\d+ object at 0x\w+>", renamed)
    assert "zebra" not in renamed.lower()


def test_of_a_copy_that_cannot_be_written_nothing_is_left(tmp_path, monkeypatch):
    run = planted(tmp_path / "run")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dpro.extensions.scrub.scrub.write_manifest", full)
    with pytest.raises(UsageError, match=r"copy: cannot be written .No space left"):
        scrub(run, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def texts(run: Path) -> str:
    """All that a run says: its files as they are, and what its tables hold."""
    files = [path.read_bytes().decode(errors="replace") for path in run.rglob("*") if path.is_file()]
    tables = [str(open_run(run).table(table).rows()) for table in TABLES.values()]
    return "\n".join([*map(str, run.rglob("*")), *files, *tables])


def test_no_name_of_the_job_is_in_any_file_of_the_copy(tmp_path):
    run = planted(tmp_path / "run")
    earlier = planted(tmp_path / "run" / "attempts" / "0")
    assert all(secret in texts(run.path) for secret in SECRETS)
    names = scrub(run, tmp_path / "copy")
    said = texts(tmp_path / "copy")
    assert [secret for secret in SECRETS if secret in said] == []
    for kept in (
        "aten::mm", "nn.Module: x", "Optimizer.step#x", "FSDP::all_gather (x", "all_reduce", "Ring",
        "--layers", "torch/distributed/c10d.py:3", "ValueError", "198.18.0.", "2001:db8::", "mesh_tp",
    ):  # fmt: skip
        assert kept in said
    for folder in (tmp_path / "copy", tmp_path / "copy" / "attempts" / "0"):
        copied = open_run(folder)
        assert copied.table(WORKERS)["host"].to_list() == [
            names.hosts["zebra-0.corp"],
            names.hosts["zebra-1.corp"],
        ]
        assert copied.manifest.applied[0].edit == "bucket:mb=25"
    assert earlier.rows() == open_run(tmp_path / "copy" / "attempts" / "0").rows()


def test_new_names_sort_as_the_old_ones_do():
    names = NewNames({f"n{number}": f"n{number}" for number in range(12)})
    seen = [f"layer{chr(97 + number)}" for number in range(20)]
    for text in seen:
        names.whole(text)
    names.settle()
    assert sorted(seen, key=names.whole) == sorted(seen)
    assert sorted(names.hosts, key=names.of_host) == sorted(names.hosts)


def test_a_host_that_is_called_by_its_address_changes_no_other_number():
    names = NewNames({"10.77.0.1": "10.77.0.1"})
    names.settle()
    assert names.mixed("10 of 77 steps of 10.77.0.1") == "10 of 77 steps of host0"


def test_a_copy_is_not_written_over_anything(tmp_path, repository):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine").touch()
    with pytest.raises(UsageError, match="not empty"):
        scrub(open_run(repository / "sample_traces" / "healthy"), tmp_path / "copy")


def test_the_owner_can_keep_which_name_is_which(tmp_path, repository):
    run, copy = repository / "sample_traces" / "slow_rank", tmp_path / "copy"
    done = dpro("scrub", run, copy, "--names", tmp_path / "names.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document, old = json.loads(done.stdout), json.loads((tmp_path / "names.json").read_text())
    assert document["hosts"] + document["addresses"] + document["names"] == len(old)
    assert old["host0"] == "vm"
    assert "layers" in old.values()


JOB = """
import torch.nn as nn
class ZebraBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.zebra_layer = nn.Linear(4, 4)

    def forward(self, x):
        return zebra_function(self.zebra_layer, x)

def zebra_function(layer, x):
    with torch.profiler.record_function("zebra range"):
        return layer(x)

model = ZebraBlock()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12): train_step()
"""


@pytest.mark.slow
def test_a_recorded_job_with_stacks_and_modules_keeps_none_of_its_names(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "zebra").mkdir()
    command = script(tmp_path / "zebra", JOB, COMPILER)
    options = ["--stacks", "--modules", "--shapes", "--skip", "3", "--every", "5"]
    run, done = record(tmp_path, command, *options, ZEBRA="zebra")
    assert done.returncode == 0, done.stderr.decode()
    said = texts(run.path)
    for name in ("ZebraBlock", "zebra_layer", "zebra_function", "zebra range", "zebra/job.py"):
        assert name in said
    copy = tmp_path / "copy" / run.path.name  # which the answers say
    names = scrub(run, copy)
    assert "zebra" not in texts(copy).lower()
    for command in (["explain"], ["whatif", "--edit", "no-comm"]):
        expected, got = answer(command, run.path), answer(command, copy)
        for of_run, of_copy in zip(expected[1].get("advice", []), got[1].get("advice", []), strict=True):
            if "…" in of_run["do"]:  # a name is cut there, which may be short in the copy
                of_run["do"] = of_copy["do"] = ""
        assert _deep(got[1], names.mixed) == _deep(expected[1], names.mixed)
