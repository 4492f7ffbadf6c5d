"""Jobs of DeepSpeed and Megatron-core that share out more than batches: buckets, operations, coordinates.

They are run by the real command where they are installed, on gloo: CONTRIBUTING.md says how to install them.
"""

import importlib.util
import json
import sys
import textwrap
from pathlib import Path

import polars as pl
import pytest

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.gradient_buckets import gradient_passes
from dpro.schema import BUCKETS, COLLECTIVES, OPERATIONS, WORKERS
from dpro.store import Run
from tests.jobs import complete, opened

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ZERO = """
import deepspeed, torch
import torch.distributed as dist

torch.set_num_threads(1)
layers = [torch.nn.Linear(4, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)]
model = torch.nn.Sequential(*layers)
config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": STAGE, "reduce_bucket_size": 4200},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(16):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
dist.destroy_process_group()
"""

# By stage: the parameters in each buffer (of 4,200 elements at most), and passes of a rank in a step.
BUFFERS = {
    1: ([["0.weight", "0.bias"], ["2.weight", "2.bias"], ["3.weight", "3.bias"]], 1),
    2: ([["3.bias", "3.weight", "2.bias"], ["2.weight", "0.bias"], ["0.weight"]], 2),
    3: ([["3.weight", "3.bias"], ["2.weight", "2.bias"], ["0.weight", "0.bias"]], 2),
}


def recorded(folder: Path, module: str, body: str, num_ranks: int) -> Run:
    """A job of a framework, recorded; skipped where it is not installed."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    (folder / "job.py").write_text(textwrap.dedent(body))
    record = [sys.executable, "-m", "dpro", "record", "-o", "run", "--every", "4", "--skip", "3"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "job.py"]
    done = complete([*record, "--", *torchrun], folder, DS_ACCELERATOR="cpu", KINETO_LOG_LEVEL="99")
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    run = opened(folder / "run")
    assert [each for each in run.manifest.warnings if "lack of memory" not in each] == []
    return run


@pytest.mark.parametrize("stage", BUFFERS)
def test_zero_says_what_is_in_each_of_its_reductions(tmp_path, stage):
    run = recorded(tmp_path, "deepspeed", ZERO.replace("STAGE", str(stage)), 2)
    names, num_passes = BUFFERS[stage]
    own = run.table(BUCKETS).filter(rank=1)
    assert [sorted(each) for each in own["names"].to_list()] == [sorted(each) for each in names]
    assert own["source"][0].startswith(f"DeepSpeed ZeRO-{stage} buckets")
    assert (own["bytes"] == own["parameter_bytes"].list.sum()).all()
    if stage < 3:  # gloo does not say how many bytes a reduce-scatter moves
        moved = run.table(COLLECTIVES).filter(rank=1, op="all_reduce", window=0)["bytes_in"].to_list()
        assert set(own["bytes"]) <= set(moved)
    passes = gradient_passes(build_graph(run).graph)
    mine = [each for each in passes if (each.rank, each.window) == (1, 0)]
    assert len(mine) == 2 * num_passes
    for each in mine:
        assert each.parameters.is_recorded
        assert each.parameters.are_sizes_known
        assert each.parameters.num_bytes.tolist() == [size for own in own["parameter_bytes"] for size in own]
        assert each.closes.tolist() == [len(names[0]) - 1, len(names[0]) + len(names[1]) - 1, 5]


# Megatron-core makes tensors on the GPU; where there is none they are made where it computes. Its layers
# are plain ones: its own need a GPU.
MEGATRON = """
import time, torch
import torch.distributed as dist
from torch import nn

torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
for name in ("zeros", "empty", "tensor", "ones"):
    def made(*args, _original=getattr(torch, name), device=None, **kwargs):
        return _original(*args, device="cpu" if device == "cuda" else device, **kwargs)
    setattr(torch, name, made)

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

CHUNKS, HIDDEN = NUM_CHUNKS, 16
WORK
sizes = {"pipeline_model_parallel_size": 2}
if CHUNKS > 1:
    sizes["virtual_pipeline_model_parallel_size"] = CHUNKS
torch.set_num_threads(1)
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(**sizes)
config = TransformerConfig(
    num_layers=4, hidden_size=HIDDEN, num_attention_heads=1, pipeline_dtype=torch.float32,
    batch_p2p_comm=False, deallocate_pipeline_outputs=True, **sizes,
)

class Chunk(nn.Module):
    model_type = ModelType.encoder_or_decoder

    def __init__(self):
        super().__init__()
        self.config, self.layer, self.given = config, nn.Linear(HIDDEN, HIDDEN), None

    def set_input_tensor(self, tensors):
        self.given = tensors[0]

    def forward(self, batch):
        return Work.apply(self.layer(batch if self.given is None else self.given))

options = DistributedDataParallelConfig(overlap_grad_reduce=False)
model = [DistributedDataParallel(config, options, Chunk()) for _ in range(CHUNKS)]
config.no_sync_func = [each.no_sync for each in model] if CHUNKS > 1 else model[0].no_sync
config.finalize_model_grads_func = lambda *_, **__: [each.finish_grad_sync() for each in model]
optimizer = torch.optim.SGD([parameter for each in model for parameter in each.parameters()], lr=0.01)

def forward_step(batches, chunk):
    return chunk(next(batches)), lambda output: (output.square().mean(), {})

def batches():
    while True:
        yield torch.ones(8, 2, HIDDEN)

def run(forward_only):
    iterators = [batches() for _ in model]
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iterators if CHUNKS > 1 else iterators[0], model=model,
        num_microbatches=4, seq_length=8, micro_batch_size=2, forward_only=forward_only,
    )

for step in range(16):
    for each in model:
        each.zero_grad_buffer()
    run(False)
    for each in model:
        for parameter in each.parameters():
            parameter.grad = parameter.main_grad
    optimizer.step()
    if step == 8:
        with torch.no_grad():
            run(True)
dist.destroy_process_group()
"""

# Takes 20 ms forward and 40 ms backward, of no core: a host may have fewer than ranks.
WORK = """
class Work(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        time.sleep(0.02)
        return value.tanh()

    @staticmethod
    def backward(context, gradient):
        time.sleep(0.04)
        return gradient.clone()
"""

PIPELINE = """
import time, deepspeed, torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

WORK
torch.set_num_threads(1)
deepspeed.init_distributed("gloo")

class Layer(nn.Linear):
    def forward(self, batch):
        return Work.apply(super().forward(batch))

layers = [Layer(16, 16) for _ in range(2)]
model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss)
config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 1000,
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

def batches():
    while True:
        yield torch.ones(2, 16), torch.ones(2, 16)

data = batches()
for step in range(16):
    engine.train_batch(data)
    if step == 8:
        engine.eval_batch(data)
dist.destroy_process_group()
"""

# Module, script, what is said of the schedule, places in the model of the chunks of each stage.
PIPELINES = {
    "1F1B of Megatron-core": ("megatron", MEGATRON.replace("NUM_CHUNKS", "1"), "Megatron-core 1F1B", 1),
    "interleaved 1F1B of Megatron-core": (
        "megatron", MEGATRON.replace("NUM_CHUNKS", "2"), "Megatron-core interleaved 1F1B", 2,
    ),
    "DeepSpeed": ("deepspeed", PIPELINE, "DeepSpeed TrainSchedule", 1),
}  # fmt: skip


def answer(folder: Path, *words: str) -> dict:
    """What a command says of the run, as JSON."""
    done = complete([sys.executable, "-m", "dpro", words[0], "run", *words[1:], "--json"], folder)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_have_their_operations_layout_bubbles_and_stages(tmp_path, name):
    module, body, source, num_chunks = PIPELINES[name]
    run = recorded(tmp_path, module, body.replace("WORK", WORK, 1), 4)
    table = run.table(OPERATIONS).filter(pl.col("step") >= 0)
    assert set(table["source"]) == {source}
    for (rank, _), own in table.group_by("rank", "step"):
        stage = rank // 2  # data-parallel ranks follow each other
        expected = {
            (kind, chunk * 2 + stage, chunk, number)
            for kind in ("forward", "backward")
            for chunk in range(num_chunks)
            for number in range(4)
        }
        assert set(own.select("kind", "place", "chunk", "micro_batch").iter_rows()) == expected
        assert own.height == len(expected)  # nothing of the validation
        assert set(own["stage"]) == {stage}
    typical = table.group_by("kind").agg(pl.col("duration_ns").median() / 1e6)
    spent = dict(typical.iter_rows())
    assert spent["forward"] >= 20
    assert spent["backward"] >= 40
    assert answer(tmp_path, "info")["layout"]["line"] == "4 ranks = dp 2 x pp 2"
    assert run.table(WORKERS).sort("rank").select("dp", "pp").rows() == [(0, 0), (1, 0), (0, 1), (1, 1)]
    bubbles = answer(tmp_path, "report")["pipeline"]
    assert [each["stage"] for each in bubbles] == [0, 1]
    slowdown = answer(tmp_path, "diagnose")["slowdown"]
    assert set(slowdown["by_stage"]) == {"0", "1"}
    predicted = answer(tmp_path, "whatif", "--edit", "pipeline:schedule=gpipe")
    assert predicted["refused"] == []
