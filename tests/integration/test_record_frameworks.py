"""Steps, groups and meshes of jobs as different frameworks run them, seen by the recorder.

Jobs of torch alone are forked from one process that has imported it, some at a time, each with a recording
of its own: that saves the import. Frameworks of others are run by the real command where they are installed.
"""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

import polars as pl
import pytest

from dpro.collectors.launch.recording import MARKERS, RAW
from dpro.collectors.launch.start import RecordOptions
from dpro.opening import ensure_finished
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.models.gradients.buckets import gradient_passes
from dpro.schema import BUCKETS, COLLECTIVES, COUNTERS, SPANS, STEPS, WORKERS
from dpro.store import Run, open_run
from tests.jobs import imports

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
EVERY, WINDOW_STEPS, SKIP = 6, 2, 3

# One rank each; `step()` trains once.
ALONE = {
    "compiled": """
        compiled = torch.compile(model, backend="eager")
        update = torch.compile(update, backend="eager")
        for _ in range(12):
            compiled(data).sum().backward()
            update()
    """,
    "accumulation": """
        for _ in range(12):
            for _ in range(4):
                loss().backward()
            update()
    """,
    "two_optimizers": """
        other = SGD(nn.Linear(4, 4).parameters(), lr=0.1)
        for _ in range(12):
            step()
            other.step()
    """,
    "gan": """
        critic = nn.Linear(4, 4)
        critics = SGD(critic.parameters(), lr=0.1)
        for _ in range(12):
            for _ in range(3):
                critic(data).sum().backward()
                critics.step()
            step()
    """,
    "scaler": """
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(12):
            optimizer.zero_grad()
            scaler.scale(loss() * (math.inf if number % 3 == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "evaluation": """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for number in range(12):
            step()
            scheduler.step()
            if number % 4 == 3:
                model.eval()
                with torch.no_grad():
                    for _ in range(5):
                        loss()
                model.train()
    """,
    "group_after_group": """
        for _ in range(12):
            for _ in range(2):
                loss().backward()
            for _ in range(3):
                optimizer.step()
            optimizer.zero_grad()
    """,
    "gradients_of_its_own": """
        for _ in range(12):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    """,
    "lbfgs": """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        def closure():
            optimizer.zero_grad()
            value = loss().square()
            value.backward()
            return value
        for _ in range(12):
            optimizer.step(closure)
    """,
    "optimizer_in_backward": """
        optimizers = {p: SGD([p], lr=0.01) for p in model.parameters()}
        def hook(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(12):
            loss().backward()
    """,
    "another_optimizer": """
        for _ in range(3):
            for _ in range(4):
                step()
            optimizer = None
            gc.collect(0)
            optimizer = SGD(model.parameters(), lr=0.1)
    """,
    "zero_redundancy": """
        from torch.distributed.optim import ZeroRedundancyOptimizer
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
        for _ in range(12):
            step()
        dist.destroy_process_group()
    """,
    "killed": """
        for _ in range(12):
            step()
        os.kill(os.getpid(), signal.SIGKILL)
    """,
    "range": """
        for _ in range(12):
            with torch.profiler.record_function("dpro::step"):
                for _ in range(2):
                    step()
    """,
    "range_beside": """
        for _ in range(12):
            for _ in range(2):
                step()
            with torch.profiler.record_function("dpro::step"):
                pass
    """,
    "function": """
        for number in range(13):
            sys.modules["__main__"].iteration(model)
    """,
    "inference": """
        inference.PATIENCE_S, inference.LOOK_S = 0.0, 0.02
        model.eval()
        with torch.inference_mode():
            while not model._compiled_call_impl:
                model(torch.ones(2000, 4))
            for _ in range(13):
                model(data)
    """,
    # As Megatron's pipelines: a stage frees what it has sent on, so that gradients are asked of the engine
    # itself; many micro-batches, and a first forward pass in which the model is found.
    "megatron": """
        inference.PATIENCE_S, inference.LOOK_S = 0.0, 0.02
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        engine = torch.autograd.Variable._execution_engine
        def backward(output, gradient):
            engine.run_backward(
                (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        while not model._compiled_call_impl:
            model(torch.ones(2000, 4))
        for _ in range(12):
            sent = []
            for _ in range(20):
                output = model(data)
                gradient = torch.ones_like(output)
                output.data = torch.empty(1)
                sent.append((output, gradient))
            for output, gradient in sent:
                backward(output, gradient)
            update()
        assert model._compiled_call_impl is None
    """,
    "evaluation_that_is_followed_by_training": """
        inference.PATIENCE_S, inference.LOOK_S = 0.0, 0.02
        model.eval()
        with torch.no_grad():
            while not model._compiled_call_impl:
                model(torch.ones(2000, 4))
            model(data)
        for _ in range(12):
            step()
        assert model._compiled_call_impl is None
    """,
}

# Two ranks each.
TOGETHER = {
    "ddp": """
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-5)
        for _ in range(12):
            with ddp.no_sync():
                ddp(data).sum().backward()
            ddp(data).sum().backward()
            update()
    """,
    "extra_optimizer": """
        ddp = nn.parallel.DistributedDataParallel(model)
        extra = nn.Parameter(torch.zeros(()))
        extras = SGD([extra], lr=0.1)
        for number in range(12):
            ddp(data).sum().backward()
            update()
            if dist.get_rank() == 0 and number % 5 == 2:
                extra.square().backward()
                extras.step()
    """,
    "large_extra_optimizer": """
        ddp = nn.parallel.DistributedDataParallel(model)
        extra = nn.Linear(64, 4)
        extras = SGD(extra.parameters(), lr=0.1)
        for number in range(42):  # a few steps are too few to detect the main optimizer
            ddp(data).sum().backward()
            update()
            if dist.get_rank() == 0 and number % 5 == 2:
                extra(torch.ones(2, 64)).sum().backward()
                extras.step()
    """,
    "fsdp": """
        from torch.distributed.fsdp import fully_shard
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            step()
    """,
    "pipeline": """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        rank = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        stage = PipelineStage(model[2 * rank], rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = SGD(model[2 * rank].parameters(), lr=0.1)
        batch = torch.ones(8, 4)
        for _ in range(12):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch)
            optimizer.step()
    """,
    "tensor_parallel": """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            step()
    """,
    "fsdp_and_tensor_parallel": """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        warnings.simplefilter("ignore")  # torch warns about views that torch itself makes
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(model, nn.Linear(4, 4))
        parallelize_module(model[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model[0], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            model(data).sum().backward()
            update()
    """,
}

NAMED = ("range", "range_beside", "function")

JOBS = """
import contextlib, importlib, json, math, os, pathlib, signal, warnings
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

sys.path.insert(0, PACKAGES)
hooks = importlib.import_module("inside.hooks")
torch.set_num_threads(1)

def iteration(model):
    model(torch.ones(2, 4)).sum().backward()

def begin(run, rank, body):
    inference = importlib.import_module("inside.steps.inference")
    hooks.install(str(run / ".raw" / "job"))
    if body in TOGETHER:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
        dist.init_process_group("gloo", init_method=f"file://{run.absolute()}.store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    data = torch.ones(2, 4)
    names = globals() | locals()
    exec(COMMON, names)
    exec(BODIES[body], names)
    if dist.is_initialized():
        dist.destroy_process_group()

COMMON = '''
optimizer = SGD(model.parameters(), lr=0.1)

def loss():
    return model(data).sum()

def update():
    optimizer.step()
    optimizer.zero_grad()

def step():
    loss().backward()
    update()
'''

def fork(name, rank):
    child = os.fork()
    if child == 0:
        with contextlib.suppress(ProcessLookupError):
            begin(pathlib.Path(name), rank, name)
        sys.exit()
    return child

gc.freeze()  # children that leave it alone are quick
children, codes = {}, {}
for name in BODIES:
    for rank in range(2 if name in TOGETHER else 1):
        children[fork(name, rank)] = name
    if "torch._dynamo" not in sys.modules:
        gc.disable()
        importlib.import_module("torch._dynamo")  # as optimizers do: once for all further jobs
        gc.freeze()
        gc.enable()
    while len(children) > 3 or (children and name == list(BODIES)[-1]):  # some at a time: they mostly wait
        child, status = os.wait()
        codes.setdefault(children.pop(child), []).append(os.waitstatus_to_exitcode(status))
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs, recorded: their folder, and the exit codes of each."""
    folder = tmp_path_factory.mktemp("jobs")
    for name in ALONE | TOGETHER:
        (folder / name / RAW / "job").mkdir(parents=True)
        (folder / name / MARKERS).mkdir()
        step = "jobs:iteration" if name == "function" else ""
        options = RecordOptions(window_steps=WINDOW_STEPS, every=EVERY, skip=SKIP, step=step)
        (folder / name / RAW / "job" / "config.json").write_text(json.dumps(asdict(options)))
        facts = {"host": socket.gethostname(), "pid": 0, "start_ticks": 0, "command": [name]}
        (folder / name / MARKERS / "job.json").write_text(json.dumps(facts))
    bodies = {name: textwrap.dedent(body) for name, body in (ALONE | TOGETHER).items()}
    head = f"PACKAGES, BODIES, TOGETHER = {str(ROOT / 'collectors')!r}, {bodies!r}, {list(TOGETHER)!r}\n"
    (folder / "jobs.py").write_text(imports() + head + JOBS)
    done = subprocess.run(
        [sys.executable, "jobs.py"], cwd=folder, env=environment(), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return (
        folder,
        json.loads(done.stdout),
        done.stderr.decode(),
    )


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD"))}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}


def recorded(jobs, name: str) -> Run:
    folder, codes, stderr = jobs
    assert set(codes[name]) == {-signal.SIGKILL if name == "killed" else 0}, stderr
    ensure_finished(folder / name)
    run = open_run(folder / name)
    assert run.manifest.warnings == []
    return run


def check_that_ranks_agree(run: Run) -> None:
    steps = run.table(STEPS)
    first, second = (steps.filter(rank=rank).select("step", "window") for rank in (0, 1))
    assert first.equals(second)
    assert first["step"].to_list() == list(range(1, 12))
    assert set(first["window"]) == {-1, 0, 1}
    assert set(run.table(SPANS)["window"]) == {0, 1}


def values(run: Run, counter: str) -> set[float]:
    return set(run.table(COUNTERS).filter(counter=counter)["value"])


@pytest.mark.parametrize("name", [name for name in ALONE if name != "inference"])
def test_every_step_is_counted_once_whatever_ends_it(jobs, name):
    run = recorded(jobs, name)
    assert run.table(STEPS)["step"].to_list() == list(range(1, 12))
    assert set(run.table(STEPS)["source"]) == {"named" if name in NAMED else "optimizer"}


def test_nothing_of_ours_is_compiled_nor_anything_said(jobs):
    _, _, stderr = jobs
    assert [line for line in stderr.splitlines() if "Profiler record function" not in line] == []


def test_range_or_function_names_the_steps(jobs):
    for name, updates in (("range", 2), ("range_beside", 2), ("function", 1)):
        assert values(recorded(jobs, name), "step_backward_calls") == {updates}


def test_backward_calls_of_a_step_are_its_micro_batches(jobs):
    assert values(recorded(jobs, "accumulation"), "step_backward_calls") == {4}
    assert values(recorded(jobs, "gan"), "step_backward_calls") == {4}
    assert values(recorded(jobs, "optimizer_in_backward"), "step_backward_calls") == {1}


def test_windows_are_whole_steps_whatever_ends_them(jobs):
    expected = [SKIP + j for j in range(WINDOW_STEPS)] + [SKIP + EVERY + j for j in range(WINDOW_STEPS)]
    guessed_otherwise_at_first = {"gan", "evaluation_that_is_followed_by_training"}
    for name in sorted(ALONE.keys() - {"inference"}):
        run = recorded(jobs, name)
        deep = run.table(STEPS).filter(pl.col("window") >= 0)
        if name in guessed_otherwise_at_first:
            assert deep["step"].to_list()[-2:] == expected[-2:], name
            continue
        assert deep["step"].to_list() == expected, name
        assert set(run.table(SPANS)["window"]) == set(deep["window"]), name


def test_each_call_of_the_outermost_model_is_a_step_where_nothing_trains(jobs):
    run = recorded(jobs, "inference")
    steps = run.table(STEPS)
    assert steps.height >= 12
    assert set(steps["source"]) == {"model call"}
    assert (
        run.table(SPANS).filter(name="aten::linear").height == 2 * steps.filter(pl.col("window") >= 0).height
    )


def test_ranks_that_count_differently_are_a_warning(jobs):
    folder, _, _ = jobs
    ensure_finished(folder / "large_extra_optimizer")
    [warning] = open_run(folder / "large_extra_optimizer").manifest.warnings
    assert "rank 1 ended" in warning
    assert "in a time in which rank 0 ended" in warning
    assert "name the step" in warning


@pytest.mark.parametrize("name", sorted(TOGETHER.keys() - {"large_extra_optimizer"}))
def test_ranks_agree_on_steps_windows_and_collectives(jobs, name):
    run = recorded(jobs, name)
    check_that_ranks_agree(run)
    calls = run.table(COLLECTIVES)
    deep = calls.filter(pl.col("window") >= 0)
    assert set(deep["window"]) == {0, 1}
    if name == "pipeline":  # messages, of which there are four in each direction and step
        sent, received = (
            deep.filter(op=op).select("window", "rank", "peer", "sequence", "group_ranks")
            for op in ("send", "recv")
        )
        assert sent.height == 4 * 2 * deep["window"].n_unique() * WINDOW_STEPS
        there = received.rename({"rank": "peer", "peer": "rank"}).select(sent.columns)
        keys = ["window", "rank", "sequence"]
        assert sent.sort(keys).equals(there.sort(keys))
        assert deep["sequence"].min() > 0
        return
    assert set(calls["group"].unique()) == {"0 default_pg"}
    first, second = (deep.filter(rank=rank).select("group", "sequence", "op") for rank in (0, 1))
    assert first.sort("sequence").equals(second.sort("sequence"))


def test_mesh_coordinates_come_from_the_names_of_its_axes(jobs):
    known = {
        "fsdp": [(0, -1, -1), (1, -1, -1)],
        "pipeline": [(-1, -1, 0), (-1, -1, 1)],
        "tensor_parallel": [(0, 0, -1), (0, 1, -1)],
        "fsdp_and_tensor_parallel": [(0, 0, -1), (0, 1, -1)],
        "ddp": [(-1, -1, -1)] * 2,
    }
    for name, coordinates in known.items():
        workers = recorded(jobs, name).table(WORKERS)
        assert workers.select("dp", "tp", "pp").rows() == coordinates, name


def test_buckets_say_which_parameters_are_in_them(jobs):
    ddp = recorded(jobs, "ddp").table(BUCKETS).filter(rank=1)
    assert ddp["names"].to_list() == [["2.bias"], ["2.weight"], ["0.bias"], ["0.weight"]]
    assert ddp["parameters"].to_list() == [[3], [2], [1], [0]]
    assert ddp["bytes"].to_list() == [16, 1024, 256, 1024]
    assert ddp["parameter_bytes"].to_list() == [[16], [1024], [256], [1024]]
    assert ddp["shapes"].to_list() == [[[4]], [[4, 64]], [[64]], [[64, 4]]]
    fsdp = recorded(jobs, "fsdp").table(BUCKETS).filter(rank=1)
    assert fsdp["names"].to_list() == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    assert fsdp["parameters"].to_list() == [[0, 1], [2, 3]]
    assert fsdp["bytes"].to_list() == [1280, 1040]
    assert fsdp["parameter_bytes"].to_list() == [[1024, 256], [1024, 16]]
    assert fsdp["shapes"].to_list() == [[[64, 4], [64]], [[4, 64], [4]]]
    both = recorded(jobs, "fsdp_and_tensor_parallel").table(BUCKETS).filter(rank=1)
    assert both["names"].to_list() == [
        ["1.weight", "1.bias"],
        ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"],
    ]
    assert both["parameters"].to_list() == [[4, 5], [0, 1, 2, 3]]
    assert both["shapes"].to_list() == [[[4, 4], [4]], [[32, 4], [32], [4, 32], [4]]]  # what a rank of tp has


def test_micro_batches_of_distributed_jobs_are_counted(jobs):
    for name, backward in (("ddp", 2), ("fsdp", 1), ("pipeline", 4), ("tensor_parallel", 1)):
        assert values(recorded(jobs, name), "step_backward_calls") == {backward}, name


# Frameworks of others: CONTRIBUTING.md says how to install them.

TRANSFORMERS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.set_num_threads(1)
sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(96)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=12, report_to=[],
    save_strategy="no", eval_strategy="steps", eval_steps=5, disable_tqdm=True, use_cpu=True,
)
model = GPT2LMHeadModel(GPT2Config(**sizes))
Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8]).train()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.ones(96, 4), batch_size=2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.end_training()
"""

LIGHTNING = """
import lightning, torch

torch.set_num_threads(1)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.net(batch).sum()

    def validation_step(self, batch, index):
        self.log("loss", self.net(batch).sum(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=12, accumulate_grad_batches=2,
    val_check_interval=6, **dict.fromkeys(quiet, False),
)
data = torch.ones(96, 4)
trainer.fit(Model(), *(torch.utils.data.DataLoader(data, batch_size=2) for _ in range(2)))
"""

DEEPSPEED = """
import deepspeed, torch
import torch.distributed as dist

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
groups = [{"params": layer.parameters(), "weight_decay": decay} for layer, decay in zip(model, (0.0, 0.1))]
config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": STAGE}, "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
for _ in range(24):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
dist.destroy_process_group()
"""

# Megatron-core allocates gradients on the GPU; given the CPU as its device, it runs there as it is.
MEGATRON = """
import contextlib, torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import nn

torch.set_num_threads(1)
torch.cuda.current_device = lambda: "cpu"
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
options = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=4000)
ddp = DistributedDataParallel(config, options, model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(12):
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp(torch.ones(2, 4)).sum().backward()
    ddp(torch.ones(2, 4)).sum().backward()
    ddp.finish_grad_sync()
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
dist.destroy_process_group()
"""

OTHERS = {
    "transformers": TRANSFORMERS,
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED.replace("STAGE", "1"),
    "deepspeed with all parameters sharded": DEEPSPEED.replace("STAGE", "3"),
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", OTHERS)
def test_job_of_another_framework_is_recorded_like_one_of_torch(tmp_path, framework):
    module = framework.split()[0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    (tmp_path / "job.py").write_text(OTHERS[framework])
    record = [sys.executable, "-m", "dpro", "record", "-o", "run", "--every", str(EVERY), "--skip", str(SKIP)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "job.py"]
    done = subprocess.run(
        [*record, "--", *torchrun],
        cwd=tmp_path,
        env=environment()
        | {"DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    ensure_finished(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.manifest.warnings == []
    check_that_ranks_agree(run)
    assert set(run.table(COLLECTIVES)["rank"]) == {0, 1}
    assert run.table(COLLECTIVES)["group"].str.len_chars().min() > 0
    assert values(run, "step_backward_calls") == {2}
    if module == "megatron":
        check_megatron(run)
    elif module != "deepspeed":
        buckets = run.table(BUCKETS)
        assert set(buckets["rank"]) == {0, 1}
        assert (buckets["bytes"] == buckets["parameter_bytes"].list.sum()).all()


def check_megatron(run: Run) -> None:
    """What its buckets hold is recorded, and is what its reductions are known by."""
    own = run.table(BUCKETS).filter(rank=1)
    assert set(own["source"]) == {"Megatron-core buckets"}
    assert own["names"].to_list() == [["4.bias", "4.weight", "2.bias", "2.weight"], ["0.bias", "0.weight"]]
    assert own["bytes"].to_list() == [(4 + 256 + 64 + 4096) * 4, (64 + 256) * 4]
    passes = gradient_passes(build_graph(run).graph)
    assert passes
    for each in passes:
        assert each.parameters.are_sizes_known
        assert each.parameters.num_bytes.tolist() == [16, 1024, 256, 16384, 256, 1024]
        assert each.closes.tolist() == [3, 5]
