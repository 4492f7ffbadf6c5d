"""Each change that can be made to a job, made to a real one of two ranks: what the job itself shows of it."""

import json
from dataclasses import replace

import pytest

from dpro.extensions.trial.changes import parse_change
from dpro.schema import CODECS, COLLECTIVES, SENSITIVITIES
from tests.jobs import COMPILER, TWO_RANKS, imports, record

pytest.importorskip("torch")

JOB = (
    imports(COMPILER)
    + """
import json, time
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

KIND, STEPS, WIDTH, BATCH = sys.argv[1], int(sys.argv[2]), 32, 4
seen = {"calls": 0, "updates": 0, "passes": 0, "begun": time.time()}

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        seen["calls"] += 1
        x = self.linear(x)
        seen["dtype"] = str(x.dtype)
        return torch.relu(x)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x):
        return self.layers(x)

class Slow(TensorDataset):
    def __getitem__(self, index):
        seen["read"] = seen.get("read", 0) + 1
        return super().__getitem__(index)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = Model()
if KIND == "fsdp":
    from torch.distributed.fsdp import fully_shard
    for layer in net.layers:
        fully_shard(layer)
    model = fully_shard(net)
else:
    cap = 0.001 if KIND == "small" else 25
    model = net if KIND == "bare" else DistributedDataParallel(net, bucket_cap_mb=cap)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.register_step_post_hook(lambda *_: seen.update(updates=seen["updates"] + 1))
torch.manual_seed(rank)
data = Slow(torch.randn(BATCH * STEPS, WIDTH))
for (x,) in DataLoader(data, batch_size=BATCH):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    seen["passes"] += 1
    seen["batch"] = len(x)
first = next(model.parameters()).detach()
first = getattr(first, "to_local", lambda: first)()
everywhere = [torch.empty_like(first) for _ in range(2)]
dist.all_gather(everywhere, first)
seen["same"] = torch.equal(*everywhere)
seen["sum"] = float(first.double().sum())
if KIND == "fsdp":
    states = [layer._get_fsdp_state() for layer in net.layers]
    prefetched = lambda s: [len(s._states_to_forward_prefetch), len(s._states_to_backward_prefetch)]
    seen["ahead"] = [prefetched(state) for state in states]
if rank == 0:
    open("seen.json", "w").write(json.dumps(seen))
dist.destroy_process_group()
"""
)
STEPS = 12


def changed(folder, edit, kind="ddp"):
    """Record the job with one change; what it saw of itself, its run, and the reasons against the change."""
    (folder / "job.py").write_text(JOB)
    change = parse_change(edit) if isinstance(edit, str) else edit
    apply = json.dumps([change.document()])
    run, done = record(folder, [*TWO_RANKS, "job.py", kind, str(STEPS)], "--no-windows", "--apply", apply)
    assert done.returncode == 0, done.stderr.decode()
    refused = {reason for made in run.manifest.applied for reason in made.refused}
    assert {made.rank for made in run.manifest.applied if made.applied or made.refused} == {0, 1}
    return json.loads((folder / "seen.json").read_text()), run, refused


def reductions(run):
    calls = run.table(COLLECTIVES, ["rank", "op"])
    return calls.filter(rank=0, op="all_reduce").height


@pytest.mark.slow
def test_passes_are_accumulated_and_gradients_reduced_in_half_of_them(tmp_path):
    seen, run, refused = changed(tmp_path, "accumulate:steps=2")
    assert not refused
    assert seen["passes"] == STEPS
    assert seen["updates"] == 2 + (STEPS - 2) // 2  # two steps are plain
    assert reductions(run) == seen["updates"]
    assert seen["same"]


@pytest.mark.slow
def test_fsdp_reduces_gradients_in_half_of_the_accumulated_passes(tmp_path):
    seen, run, refused = changed(tmp_path, "accumulate:steps=2", "fsdp")
    assert not refused
    calls = run.table(COLLECTIVES, ["rank", "op"]).filter(rank=0)
    scattered = calls.filter(calls["op"].is_in(["all_reduce", "reduce_scatter"])).height  # the former on gloo
    assert seen["updates"] == 2 + (STEPS - 2) // 2
    assert scattered == 3 * seen["updates"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_blocks_run_forward_twice_where_they_are_recomputed(tmp_path, kind):
    seen, _, refused = changed(tmp_path, "recompute:module=layers.*", kind)
    assert not refused
    assert seen["calls"] == 3 * (2 * STEPS - 2)  # not in the first two steps


@pytest.mark.slow
def test_batches_are_larger_and_fewer(tmp_path):
    seen, _, refused = changed(tmp_path, "batch:factor=2")
    assert not refused
    assert (seen["batch"], seen["passes"]) == (8, STEPS // 2)


@pytest.mark.slow
def test_fsdp_names_the_modules_that_it_gathers_early(tmp_path):
    seen, _, refused = changed(tmp_path, "prefetch:ahead=1", "fsdp")
    assert not refused
    assert seen["ahead"] == [[1, 0], [1, 1], [0, 2]]  # backward one is gathered early in any case


@pytest.mark.slow
def test_no_gradient_is_reduced_without_communication(tmp_path):
    seen, run, refused = changed(tmp_path, "no-comm")
    assert not refused
    assert reductions(run) == 0
    assert not seen["same"]


@pytest.mark.slow
def test_input_is_read_no_more_once_batches_are_returned_again(tmp_path):
    seen, _, refused = changed(tmp_path, "hide-input")
    assert not refused
    assert seen["passes"] == STEPS
    assert seen["read"] == 3 * 4  # three batches


@pytest.mark.slow
def test_the_model_computes_in_half_precision_on_both_ranks(tmp_path):
    seen, _, refused = changed(tmp_path, "precision:dtype=bf16")
    assert not refused
    assert seen["dtype"] == "torch.bfloat16"


@pytest.mark.slow
def test_only_the_gradients_of_some_layers_are_compressed(tmp_path):
    seen, run, refused = changed(tmp_path, "compress:to=bf16,module=layers.0.*", "small")
    assert not refused
    assert seen["same"]
    sizes = run.table(COLLECTIVES, ["rank", "op", "dtype"]).filter(rank=0, op="all_reduce")
    assert reductions(run) > 0
    assert sizes["dtype"].n_unique() == 2 or sizes["dtype"].unique().to_list() == [""]


@pytest.mark.slow
def test_codecs_are_measured_and_the_one_chosen_for_each_bucket_is_used(tmp_path):
    for name in ("probe", "as it is", "chosen"):
        (tmp_path / name).mkdir()
    plain, _, _ = changed(tmp_path / "as it is", "threads:n=1", "small")
    seen, probed, refused = changed(tmp_path / "probe", "compress:probe", "small")
    assert not refused
    assert seen["sum"] == plain["sum"]  # to the last bit
    measured = probed.table(CODECS).filter(rank=0, codec="to=bf16").sort("bucket")
    buckets = dict(zip(measured["bucket"], measured["names"].to_list()))
    assert len(buckets) > 1
    assert measured["step"].n_unique() == 3
    ways = [{"names": names, "to": "bf16" if bucket == 0 else ""} for bucket, names in buckets.items()]
    change = replace(parse_change("compress:budget=0.1"), arguments={"buckets": ways})
    seen, run, refused = changed(tmp_path / "chosen", change, "small")
    assert not refused
    assert seen["same"]
    assert seen["sum"] != plain["sum"]
    assert reductions(run) == reductions(probed)
    bytes_in = run.table(COLLECTIVES, ["rank", "op", "bytes_in"]).filter(rank=0, op="all_reduce")["bytes_in"]
    before = probed.table(COLLECTIVES, ["rank", "op", "bytes_in"]).filter(rank=0, op="all_reduce")["bytes_in"]
    assert bytes_in.sum() < before.sum()


@pytest.mark.slow
def test_sensitivities_are_measured_and_the_chosen_modules_compute_in_half_precision(tmp_path):
    for name in ("probe", "as it is", "chosen"):
        (tmp_path / name).mkdir()
    plain, _, _ = changed(tmp_path / "as it is", "threads:n=1")
    seen, run, refused = changed(tmp_path / "probe", "precision:probe")
    assert not refused
    assert seen["sum"] == plain["sum"]  # to the last bit
    found = run.table(SENSITIVITIES)
    assert found["module"].unique().sort().to_list() == [f"layers.{at}.linear" for at in range(3)]
    assert set(found["rank"]) == {0, 1}
    assert set(found["method"]) == {"hutchinson"}
    arguments = {"dtype": "bf16", "layers": ["layers.2.linear"]}
    change = replace(parse_change("precision:budget=0.1"), arguments=arguments)
    seen, _, refused = changed(tmp_path / "chosen", change)
    assert not refused
    assert seen["dtype"] == "torch.float32"  # what the module returns is as it was
    assert seen["sum"] != plain["sum"]
    assert seen["same"]


@pytest.mark.slow
def test_a_rank_sleeps_in_each_step(tmp_path):
    _, run, refused = changed(tmp_path, "slow:rank=1,ms=5")
    assert not refused
    said = {made.rank: made.applied[0].where for made in run.manifest.applied}
    assert said == {0: "nothing: the edit is for another rank", 1: "each step"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "kind", "code"),
    [
        ("accumulate:steps=2", "bare", "with model.no_sync()"),
        ("prefetch:ahead=1", "ddp", "set_modules_to_forward_prefetch"),
        ("recompute:module=blocks.*", "ddp", "torch.utils.checkpoint.checkpoint(block"),
        ("cuda-graph", "ddp", 'torch.compile(model, backend="cudagraphs")'),
        ("algorithm:to=tree", "ddp", "NCCL_ALGO=Tree"),
        ("algorithm:proto=ll128", "ddp", "NCCL_PROTO=LL128"),
        ("no-sync", "ddp", "read them every N steps"),
        ("slow:rank=7,ms=1", "ddp", "there is no rank 7"),
    ],
)
def test_what_cannot_be_changed_from_outside_is_refused_with_what_to_write(tmp_path, edit, kind, code):
    seen, _, refused = changed(tmp_path, edit, kind)
    assert seen["passes"] == STEPS  # the job went on as it is
    assert any(code in reason for reason in refused), refused
