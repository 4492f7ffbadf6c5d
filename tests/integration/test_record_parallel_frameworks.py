"""Jobs of DeepSpeed and Megatron-core that share out more than batches: buckets, operations, coordinates.

They are run by the real command where they are installed, on gloo: CONTRIBUTING.md says how to install them.
"""

import importlib.util
import sys
import textwrap
from pathlib import Path

import pytest

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.models.gradients.buckets import gradient_passes
from dpro.schema import BUCKETS, COLLECTIVES
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
