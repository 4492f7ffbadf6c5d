"""Tensor plans, made to DDP on a group of one; `tests/integration/test_tensor_plans.py` has two ranks."""

import json

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from _dpro_inside_the_job import torch_internals  # noqa: E402
from _dpro_inside_the_job.calls.buckets import of_ddp  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dpro.extensions.trial.inside.reduction import in_pieces  # noqa: E402

pytestmark = pytest.mark.usefixtures("group")


class Model(torch.nn.Module):
    """An embedding, three layers and a head, which is left out where `skips` says so."""

    def __init__(self, **of_tokens):
        super().__init__()
        self.skips = False
        self.tokens = torch.nn.Embedding(8, 16, **of_tokens)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.head = torch.nn.Linear(16, 4)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x if self.skips else self.head(x)


NAMES = [name for name, _ in Model().named_parameters()]
# Not contiguous, neither in the order of the model nor in that of readiness.
MIXED = [
    ["head.weight", "layers.1.bias"],
    ["tokens.weight"],
    ["layers.0.weight", "layers.0.bias"],
    ["layers.1.weight"],
    ["layers.2.weight", "layers.2.bias", "head.bias"],
]


def planned(job, *reductions, **first):
    """Have the job changed by a plan; `first` are the keys of its first reduction."""
    rows = [{"gradients": names, "pieces": 1, "reduce_in": ""} for names in reductions]
    rows[0] |= first
    (job.folder / "plan.json").write_text(json.dumps({"tensor_plan": 1, "reductions": rows}))
    job.change(f"tensors:plan={job.folder / 'plan.json'}")


def trained(job, steps=4, of_model=None, skips=(), **arguments):
    """A module after some steps, and its parameters."""
    torch.manual_seed(0)
    module = DistributedDataParallel(Model(**of_model or {}), **arguments)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(steps):
        module.module.skips = step in skips
        optimizer.zero_grad()
        job.backward(module(torch.randint(8, (4,))).pow(2).sum())
        optimizer.step()
    return module, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def recorded(module):
    return [bucket["names"] for bucket in of_ddp(module)["buckets"]]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 0.001},
    ],
)
def test_gradients_are_reduced_as_planned_from_the_first_step_on_and_stay_the_same(job, arguments):
    _, expected = trained(job, **arguments)
    planned(job, *MIXED)
    assert recorded(trained(job, steps=1, **arguments)[0]) == MIXED
    module, found = trained(job, **arguments)
    assert recorded(module) == MIXED
    assert torch.equal(found, expected)
    assert job.places() == [{"where": "DDP of Model: 5 reductions", "instead_of": "", "times": 2}]


def test_gradients_that_are_not_used_in_some_steps_are_reduced_too(job):
    _, expected = trained(job, skips=(1, 2), find_unused_parameters=True)
    planned(job, *MIXED)
    module, found = trained(job, skips=(1, 2), find_unused_parameters=True)
    assert recorded(module) == MIXED
    assert torch.equal(found, expected)


def test_ddp_complains_of_unused_gradients_as_it_does_without_a_plan(job):
    planned(job, *MIXED)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        trained(job, skips=(1,))


def test_gradients_are_accumulated_without_reduction_as_ever(job):
    def accumulated():
        torch.manual_seed(0)
        module = DistributedDataParallel(Model())
        for _ in range(2):
            with module.no_sync():
                module(torch.randint(8, (4,))).sum().backward()
            job.backward(module(torch.randint(8, (4,))).sum())
        return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])

    expected = accumulated()
    planned(job, *MIXED)
    assert torch.equal(accumulated(), expected)


@pytest.mark.parametrize(("word", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_only_the_gradients_that_the_plan_says_are_reduced_in_half_precision(job, word, dtype):
    plain, _ = trained(job, steps=1)
    planned(job, *MIXED, reduce_in=word, pieces=3)
    module, _ = trained(job, steps=1)
    exact, found = (dict(each.module.named_parameters()) for each in (plain, module))
    for name in NAMES:
        gradient = exact[name].grad.to(dtype).float() if name in MIXED[0] else exact[name].grad
        assert torch.equal(found[name].grad, gradient), name
    assert recorded(module) == MIXED
    where = {place["where"] for place in job.places()}
    assert f"{word}, in 3 pieces: gradients of head.weight to layers.1.bias" in where


class Bucket:
    """As DDP hands it to a hook."""

    def __init__(self, gradients):
        self.gradients = gradients

    def buffer(self):
        return self.gradients


@pytest.mark.parametrize(("elements", "pieces", "sizes"), [(10, 3, [4, 3, 3]), (2, 5, [1, 1]), (6, 1, [6])])
def test_a_bucket_is_reduced_in_pieces_of_equal_size(monkeypatch, elements, pieces, sizes):
    sent, reduce = [], dist.all_reduce

    def noting(tensor, **options):
        sent.append(tensor.numel())
        return reduce(tensor, **options)

    hook = in_pieces(dist.group.WORLD, pieces, "")
    monkeypatch.setattr(dist, "all_reduce", noting)
    gradients = torch.arange(float(elements))
    assert torch.equal(hook(None, Bucket(gradients.clone())).wait(), gradients)
    assert sent == sizes


def test_a_hook_of_the_script_stays_where_the_plan_needs_none(job):
    planned(job, *MIXED)
    module = DistributedDataParallel(Model())
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    job.backward(module(torch.randint(8, (4,))).sum())
    assert recorded(module) == MIXED
    assert len(job.places()) == 1


def test_a_hook_of_the_script_wins_over_pieces(job):
    planned(job, *MIXED, pieces=2)
    module = DistributedDataParallel(Model())
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    job.backward(module(torch.randint(8, (4,))).sum())
    assert "the script has registered a communication hook itself" in job.refused()


@pytest.mark.parametrize(
    ("reductions", "reason"),
    [
        (MIXED[:-1], "the plan has no gradient layers.2.weight, which DDP of Model reduces"),
        ([*MIXED, ["tail.weight"]], "DDP of Model has no gradient tail.weight, which the plan reduces"),
    ],
)
def test_a_plan_of_other_gradients_is_refused_and_the_job_goes_on_as_it_is(job, reductions, reason):
    _, expected = trained(job)
    planned(job, *reductions, pieces=2)
    module, found = trained(job)
    assert job.refused() == f"{reason}: make a plan from a recording of this job"
    assert torch.equal(found, expected)
    assert module._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    assert not module._comm_hooks


def test_two_modules_with_other_gradients_are_refused_and_equal_ones_are_not(job):
    planned(job, *MIXED)
    first, second = (DistributedDataParallel(Model()) for _ in range(2))
    assert recorded(first) == recorded(second) == MIXED
    assert job.places()[0]["times"] == 2
    DistributedDataParallel(torch.nn.Linear(4, 4))
    assert "DDP of Linear has no gradient head.weight" in job.refused()


def test_gradients_of_two_types_are_not_reduced_as_one(job):
    planned(job, *MIXED)
    model = Model()
    model.head.to(torch.bfloat16)
    DistributedDataParallel(model)
    said = job.refused()
    assert "head.weight (torch.bfloat16) and layers.1.bias (torch.float32) differ in dtype" in said


@pytest.mark.parametrize(
    ("reductions", "first"), [([NAMES[:2], NAMES[2:]], {}), ([NAMES[:1], NAMES[1:]], {"pieces": 2})]
)
def test_sparse_gradients_are_reduced_alone_and_as_they_are(job, reductions, first):
    planned(job, *reductions, **first)
    trained(job, of_model={"sparse": True})
    assert "tokens.weight has sparse gradients: plan a separate, unchanged reduction for it" in job.refused()


def test_sparse_gradients_that_are_planned_alone_are_reduced(job):
    _, expected = trained(job, of_model={"sparse": True})
    planned(job, *MIXED)
    _, found = trained(job, of_model={"sparse": True})
    assert len(job.places()) == 1
    assert torch.equal(found, expected)


def test_what_the_reducer_of_ddp_refuses_leaves_the_job_as_it_is(job, monkeypatch):
    monkeypatch.setattr("dpro.extensions.trial.inside.tensors._ensure_possible", lambda *_, **__: None)
    planned(job, NAMES)
    model = Model()
    model.head.to(torch.bfloat16)
    module = DistributedDataParallel(model)
    assert "dtype" in job.refused()
    assert len(recorded(module)) > 1


def test_a_module_that_is_wrapped_meanwhile_has_its_own_buckets(job, monkeypatch):
    inner, logger = [], dist.Logger

    def wrap_another(reducer):
        monkeypatch.setattr(dist, "Logger", logger)
        inner.append(DistributedDataParallel(torch.nn.Linear(4, 4)))
        return logger(reducer)

    planned(job, *MIXED)
    monkeypatch.setattr(dist, "Logger", wrap_another)
    assert recorded(DistributedDataParallel(Model())) == MIXED
    assert [len(names) for names in recorded(inner[0])] == [2]
    assert job.refused().startswith("DDP of Linear has no gradient head.weight")
    assert ";" not in job.refused()


def test_compiled_autograd_reduces_without_a_plan(job):
    import torch._dynamo

    planned(job, *MIXED)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        DistributedDataParallel(Model())
    assert "compiled autograd reduces gradients itself" in job.refused()


def test_a_job_without_ddp_is_not_changed_and_says_so(job):
    planned(job, *MIXED)
    assert "wraps no module" in job.refused()


def test_fsdp2_is_refused_with_what_to_do(job, monkeypatch):
    monkeypatch.setattr("dpro.extensions.trial.inside.reduction.fsdp_states", lambda: {"model": object()})
    planned(job, *MIXED)
    job.steps(1, 2, 3)
    assert "with FSDP2 call fully_shard() on other modules" in job.refused()


def test_a_pytorch_that_lacks_what_a_plan_needs_refuses_it(job, monkeypatch):
    monkeypatch.setattr(torch_internals, "internal", lambda _: None)
    planned(job, *MIXED)
    assert "this version of PyTorch" in job.refused()
