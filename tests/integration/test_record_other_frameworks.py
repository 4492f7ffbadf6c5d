"""Jobs of Hugging Face, Lightning, DeepSpeed and Megatron-core, recorded where those are installed."""

import importlib.util
import subprocess
import sys

import pytest

from dpro.analysis.analysis import Analysis
from dpro.opening import ensure_finished
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.gradient_buckets import gradient_passes
from dpro.schema import BUCKETS, COLLECTIVES
from dpro.store import Run, open_run
from tests.loops import EVERY, SKIP, check_that_ranks_agree, environment, values

pytest.importorskip("torch")
from dpro.verdict.verdict import explain

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


TRL = """
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)
words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "]
core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
sizes |= {"vocab_size": len(words), "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1}
model = Qwen2ForCausalLM(Qwen2Config(bos_token_id=1, **sizes))
arguments = GRPOConfig(
    "out", per_device_train_batch_size=4, num_generations=4, max_completion_length=12, max_steps=12,
    use_cpu=True, bf16=False, save_strategy="no", beta=0.0, disable_tqdm=True, report_to=[],
)

def count(completions, **_):
    return [float(completion.count("a")) for completion in completions]

data = Dataset.from_dict({"prompt": ["say abc", "hello"] * 32})
GRPOTrainer(model, count, args=arguments, train_dataset=data, processing_class=tokenizer).train()
"""


@pytest.mark.slow
def test_steps_of_trl_have_their_phases(tmp_path):
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed")
    (tmp_path / "job.py").write_text(TRL)
    record = [
        sys.executable,
        "-m",
        "dpro",
        "record",
        "-o",
        "run",
        "--every",
        "4",
        "--",
        sys.executable,
        "job.py",
    ]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(record, cwd=tmp_path, env=environment() | offline, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    ensure_finished(tmp_path / "run")
    analysis = Analysis(open_run(tmp_path / "run"))
    shares = dict(analysis.phases.select("phase", "share").iter_rows())
    assert {"rollout", "reward", "training"} <= shares.keys()
    assert shares["rollout"] > 2 * shares["training"] > 0
    assert explain(analysis).phase.startswith("rollout takes")
