"""`dpro record --pretend-world`: one process as ranks of a larger job, and what a step of that would take."""

import functools
import json
from collections import Counter

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.app import notes_on_selection
from dpro.dashboards.command import load
from dpro.dashboards.links import Link
from dpro.members import members_of
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.graph import NodeKind
from dpro.replay.steps import host_facts
from dpro.replay.timeline import measured_step_times
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.schema.members import num_members
from dpro.store import Run
from tests.commands import dpro
from tests.jobs import COMPILER, TWO_RANKS, record, script

pytest.importorskip("torch")

REDUCES = """
import torch.distributed as dist
dist.init_process_group("gloo")
for _ in range(12):
    train_step()
    gradient = torch.ones(1000)
    dist.all_reduce(gradient)
mean = torch.ones(1)
dist.all_reduce(mean)
mean = mean / dist.get_world_size()
print(f"{dist.get_rank()} of {dist.get_world_size()}, mean {mean.item():.2f}", dist.get_backend())
if mean.item() < 1:
    print("decided")
"""
WINDOW = ("--skip", "3", "--window-steps", "6")


@pytest.fixture(scope="module")
def pretended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretended")
    options = ("--pretend-world", "256", "--pretend-ranks", "9", *WINDOW)
    return record(folder, script(folder, REDUCES), *options)


def test_a_script_runs_as_a_rank_of_a_larger_job_until_it_decides_by_what_it_received(pretended):
    _, done = pretended
    assert done.stdout.decode().startswith("9 of 256, mean 0.00 gloo")
    assert b"decided" not in done.stdout
    assert b"rank 9 of 256 cannot be pretended: all_reduce of 256 ranks at job.py:" in done.stderr
    assert done.returncode == 3


def test_run_says_that_its_ranks_were_pretended(pretended):
    run, _ = pretended
    assert run.manifest.is_pretended
    assert (run.manifest.ranks, run.manifest.world_size) == ([9], 256)
    assert "1 of 256 ranks was pretended" in dpro("info", str(run.path)).stdout
    assert "1 of 256 ranks was pretended" in dpro("report", str(run.path)).stdout
    diagnosed = dpro("diagnose", str(run.path))
    assert diagnosed.returncode == 1
    assert "none waited for another" in diagnosed.stderr


def test_dashboard_says_above_every_view_that_ranks_were_pretended(pretended):
    run, _ = pretended
    assert notes_on_selection(load(run), Link()) == (
        "1 of 256 ranks was pretended, one by one on one machine: no waiting was measured."
    )


def test_each_call_is_recorded_with_its_group_and_when_its_result_was_asked_for(pretended):
    run, _ = pretended
    calls = run.table(COLLECTIVES).filter(pl.col("window") >= 0)
    assert calls.height == 6
    assert set(calls["op"]) == {"all_reduce"}
    assert set(calls["bytes_in"]) == {4000}
    assert set(calls["group_ranks"]) == {"0-255"}
    assert (calls["asked_ns"] >= calls["start_ns"]).all()
    assert run.table(COLLECTIVES).filter(window=-1).height == 7


def test_step_is_refused_without_times_of_communication_and_given_with_them(pretended, tmp_path):
    run, _ = pretended
    alone = json.loads(dpro("replay", str(run.path), "--json").stdout)
    assert alone["pretended"]["step_ms"] is None
    assert "--network-table" in alone["pretended"]["unknown"][0]
    assert not alone["answerable"]
    table = tmp_path / "network.csv"
    rows = [f"all_reduce,{size},5000,256,32" for size in (1000, 2000, 4000, 8000, 16000)]
    table.write_text("\n".join(["op,bytes,time_us,num_ranks,hosts", *rows]))
    filled = json.loads(dpro("replay", str(run.path), "--network-table", str(table), "--json").stdout)
    found = filled["pretended"]
    # One all-reduce of 5 ms follows each step of about a millisecond, and the next step waits for it.
    assert found["step_ms"] - found["compute_ms"] == pytest.approx(5, rel=0.25)
    assert found["low_ms"] <= found["step_ms"] <= found["high_ms"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--pretend-world", "256", "--pretend-ranks", "300"), "rank 300 is not in --pretend-world 256"),
        (("--pretend-ranks", "0"), "need --pretend-world"),
    ],
)
def test_what_does_not_go_together_is_refused(options, complaint, tmp_path):
    done = dpro("record", "-o", str(tmp_path / "run"), *options, "--", "python", "train.py")
    assert done.returncode == 2
    assert complaint in done.stderr


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (
            ("attach", "RUN", "--pretend-world", "4"),
            "--pretend-world is an option of dpro record: a running job already has",
        ),
        (
            ("try", "gc", "--pretend-ranks", "0", "--", "python"),
            "--pretend-ranks is an option of dpro record: a try",
        ),
    ],
)
def test_commands_other_than_record_pretend_no_ranks_and_say_so(command, complaint):
    done = dpro(*command)
    assert done.returncode == 2
    assert complaint in " ".join(done.stderr.split())


def test_a_launcher_as_command_is_refused(tmp_path):
    done = dpro("record", "-o", str(tmp_path / "run"), "--pretend-world", "8", "--", "torchrun", "train.py")
    assert done.returncode == 2
    assert "torchrun starts ranks itself" in done.stderr


OBJECTS = """
import torch.distributed as dist
dist.init_process_group("gloo")
config = [{"width": 4}] if dist.get_rank() == 0 else [None]
dist.broadcast_object_list(config, src=0)
train_step(), train_step()
print(dist.get_rank(), config)
"""


ASKS = """
import math
import torch.distributed as dist
dist.init_process_group("gloo")
train_step(), train_step()
loss = torch.ones(1)
dist.all_reduce(loss)
print(f"rounded {round(loss.item(), 2)}")
assert not math.isnan(1.0) and math.isinf(float("inf"))
if math.isnan(loss.item()):
    print("diverged")
print("decided")
"""


@pytest.mark.slow
def test_asking_whether_a_received_number_is_one_is_refused(tmp_path):
    _, done = record(tmp_path, script(tmp_path, ASKS), "--pretend-world", "4")
    assert done.stdout.decode() == "rounded 1.0\n"
    assert b"all_reduce of 4 ranks at job.py:" in done.stderr
    assert done.returncode == 3


@pytest.mark.slow
def test_objects_of_a_rank_come_from_where_it_was_pretended_and_else_are_refused(tmp_path):
    (tmp_path / "both").mkdir()
    _, done = record(
        tmp_path / "both", script(tmp_path, OBJECTS), "--pretend-world", "4", "--pretend-ranks", "0,3"
    )
    assert done.stdout.decode().split("\n")[:2] == ["0 [{'width': 4}]", "3 [{'width': 4}]"]
    assert done.returncode == 0
    (tmp_path / "one").mkdir()
    _, done = record(
        tmp_path / "one", script(tmp_path, OBJECTS), "--pretend-world", "4", "--pretend-ranks", "3"
    )
    assert b"broadcast_object_list from rank 0 at job.py:" in done.stderr
    assert done.returncode == 3


# Real jobs against the same ranks pretended: layers that sleep, so that ranks share no core.

JOB = """
import sys
import time
import torch.distributed as dist
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient.clone()

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return Sleep.apply(x + self.down(torch.relu(self.up(x))))

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
kind, device = sys.argv[1], torch.device("cpu")
model = nn.Sequential(*[Layer() for _ in range(2 * world)])
if kind == "ddp":
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
elif kind == "fsdp":
    from torch.distributed.fsdp import fully_shard
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
elif kind == "tp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
elif kind == "pp":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    model = nn.Sequential(*model[2 * rank : 2 * rank + 2])
    stage = PipelineStage(model, rank, world, device)
    loss = lambda out, target: (out - target).square().mean()
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(16, 64)
for _ in range(12):
    if kind == "pp":
        schedule.step(*[data][:rank == 0], **({"target": data} if rank == world - 1 else {}))
    else:
        model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
RANK, RANKS = 2, 4
BUSY = 0.05  # of a step of real ranks: by as much as this other programs lengthen it


# Operators on the calling thread when it waits for one of gloo's reduce-scatters: gloo has made the sum of
# all, cuts it into a part per rank, and copies its own.
WAIT = dict.fromkeys(("aten::narrow", "aten::slice", "aten::as_strided"), RANKS)
WAIT |= dict.fromkeys(("aten::chunk", "aten::split", "aten::copy_"), 1)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Of a kind of job: four real ranks, and the same four pretended."""

    @functools.cache
    def recorded(kind: str) -> tuple[Run, Run]:
        folder = tmp_path_factory.mktemp(kind)
        command = [*script(folder, JOB, COMPILER), kind]
        (folder / "real").mkdir()
        (folder / "pretended").mkdir()
        ranks = [*TWO_RANKS[:-1], str(RANKS), *command[1:]]
        real, done = record(folder / "real", ranks, *WINDOW, "--every", "20")
        assert done.returncode == 0, done.stderr
        options = ("--pretend-world", str(RANKS), "--pretend-ranks", f"0-{RANKS - 1}", *WINDOW)
        pretended, done = record(folder / "pretended", command, *options)
        assert done.returncode == 0, done.stderr
        return real, pretended

    return recorded


def of_window(run: Run) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Operators and collectives of a rank in its deep window."""
    spans = run.table(SPANS).filter(rank=RANK, kind="cpu_op")
    calls = run.table(COLLECTIVES).filter((pl.col("rank") == RANK) & (pl.col("window") >= 0))
    return spans, calls.sort("enqueued_ns", "collective_id")


def outside_of_collectives(spans: pl.DataFrame) -> Counter[str]:
    """How often each operator ran on the thread that calls collectives, but in none of these calls."""
    spans = spans.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns")).sort("start_ns")
    is_call = pl.col("name").str.starts_with("c10d::")
    calls = spans.filter(is_call)
    own = spans.filter(~is_call & pl.col("tid").is_in(calls["tid"].unique().implode()))
    last = own.join_asof(calls.select("start_ns", called_until="end_ns"), on="start_ns")
    return Counter(last.filter(pl.col("end_ns") > pl.col("called_until").fill_null(-1))["name"])


HSDP = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 8), mesh_dim_names=("replicate", "shard"))
model = torch.nn.Linear(64, 64)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    model(torch.ones(4, 64)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(dist.get_rank(), mesh.get_coordinate())
"""


@pytest.mark.slow
def test_a_mesh_of_two_axes_is_pretended_with_the_groups_of_each_rank(tmp_path):
    options = ("--pretend-world", "16", "--pretend-ranks", "0,9", *WINDOW)
    run, done = record(tmp_path, script(tmp_path, HSDP, COMPILER), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines() == ["0 (0, 0)", "9 (1, 1)"]
    calls = run.table(COLLECTIVES).filter(pl.col("window") >= 0)
    ran = calls.group_by("rank", "op", "group_ranks").len("calls").sort("rank", "op", "group_ranks").rows()
    replicas = {0: [0, 8], 9: [1, 9]}
    shards = {0: list(range(8)), 9: list(range(8, 16))}
    assert {(rank, op, *members_of(ranks)) for rank, op, ranks, _ in ran} == {
        (rank, op, *ranks)
        for rank in (0, 9)
        for op, ranks in (
            ("all_gather", shards[rank]),
            ("reduce_scatter", shards[rank]),
            ("all_reduce", replicas[rank]),  # of gradients
            ("all_reduce", shards[rank]),  # of the norm
        )
    }
    assert "layout     16 ranks = dp 16" in dpro("info", str(run.path)).stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp", "pp"])
def test_pretended_ranks_do_what_real_ones_do(kind, both):
    real, ours = both(kind)
    (their_spans, their_calls), (our_spans, our_calls) = of_window(real), of_window(ours)
    assert our_calls["op"].to_list() == their_calls["op"].to_list()
    assert our_calls["bytes_in"].to_list() == their_calls["bytes_in"].to_list()
    assert our_calls["bytes_out"].to_list() == their_calls["bytes_out"].to_list()
    if kind == "fsdp":
        waits = Counter({name: count * 48 for name, count in WAIT.items()})
        assert outside_of_collectives(their_spans) == outside_of_collectives(our_spans) + waits
    else:
        assert Counter(our_spans["name"]) == Counter(their_spans["name"])
    asleep = [
        spans.filter(name="SleepBackward")["duration_ns"].quantile(0.1) for spans in (their_spans, our_spans)
    ]
    assert asleep[1] == pytest.approx(asleep[0], rel=0.06)
    assert ours.table(STEPS)["rank"].n_unique() == RANKS


def network_of(built: Built) -> pl.DataFrame:
    """A network table of a job's own transfers: what those of each kind and size took in the mean."""
    nodes = built.graph.nodes
    transfers = np.flatnonzero(nodes.kind == NodeKind.TRANSFER)
    columns = ("collective", "bytes", "duration")
    took = pl.DataFrame({name: getattr(nodes, name)[transfers] for name in columns})
    calls = built.matching.rows.group_by(pl.col("instance").cast(pl.Int64).alias("collective")).agg(
        pl.col("op", "group_ranks").first()
    )
    message = pl.col("op").is_in(["send", "recv"])
    return (
        took.cast(pl.Int64)
        .join(calls, on="collective")
        .with_columns(
            op=pl.when(message).then(pl.lit("send_recv")).otherwise("op"),
            num_ranks=pl.when(message).then(2).otherwise(num_members()),
        )
        .group_by("op", "bytes", "num_ranks")
        .agg(time_ns=pl.col("duration").mean())
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "pp"])
def test_replayed_step_of_pretended_ranks_meets_the_measured_step(kind, both, tmp_path):
    real, ours = both(kind)
    built = build_graph(real)
    measured = measured_step_times(built.graph)["duration_ns"].median() / 1e6
    network_of(built).write_csv(tmp_path / "network.csv")
    done = dpro("replay", str(ours.path), "--network-table", str(tmp_path / "network.csv"), "--json")
    found = json.loads(done.stdout)["pretended"]
    assert found["step_ms"] <= 1.1 * measured  # real ranks are no faster than ranks with cores of their own
    facts = host_facts(real.table(STEPS), real.table(COUNTERS)).drop_nulls("run_queue_ns")
    waited = facts["run_queue_ns"].sum() / facts["duration_ns"].sum()
    if waited > BUSY:
        pytest.skip(f"real ranks waited for a core for {waited:.0%} of their steps")
    # Real ranks share the cores of the machine, which lengthens what they do besides sleeping.
    assert found["step_ms"] >= 0.9 * measured
    assert found["low_ms"] <= measured <= found["high_ms"]
    assert "share" in found["how"][-1]
