"""What probes measure of gradients, and that the job does not see it."""

import json

import pytest

torch = pytest.importorskip("torch")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dpro.extensions.trial.inside.probes import (  # noqa: E402  # noqa: E402  # noqa: E402
    BEGINS_AT_STEP,
    CODECS,
    PRECISIONS,
    STEPS,
    _Bucket,
    round_to,
    traces,
)


def lost(codec, *gradients):
    """The share of gradients of one bucket that a codec loses."""
    bucket = _Bucket(0, 0, list(gradients), ["weight"] * len(gradients))
    bucket.copies = dict(enumerate(gradients))
    flat = torch.cat([each.reshape(-1) for each in gradients])
    encode, decode = CODECS[codec]
    for _ in range(4):
        made = decode(encode(bucket, flat), flat)
    return float((made - flat).norm() / flat.norm())


def test_a_codec_loses_what_it_should():
    one_direction = torch.outer(torch.arange(1.0, 17), torch.arange(1.0, 33))
    assert lost("powersgd_rank=1", one_direction) < 1e-5
    assert lost("powersgd_rank=1", torch.eye(16)) == pytest.approx((15 / 16) ** 0.5, rel=1e-3)
    assert lost("powersgd_rank=1", torch.ones(5)) == 0  # no matrix: it goes as it is
    assert lost("topk=0.1", torch.tensor([3.0, 4.0] + [0.0] * 18)) == 0
    assert lost("topk=0.1", torch.ones(100)) == pytest.approx(0.9**0.5)
    assert lost("to=bf16", torch.tensor([1.0, 1 + 2**-9])) == pytest.approx(2**-9 / 2**0.5, rel=1e-2)
    assert lost("to=fp16", torch.tensor([1.0, 1 + 2**-9])) == 0


def trained(job, group, probe):
    """Parameters after some steps, and how many numbers were drawn."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16, bias=False) for _ in range(3)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, BEGINS_AT_STEP + STEPS + 3):
        optimizer.zero_grad()
        job.backward(model(torch.randn(4, 16)).square().mean())
        optimizer.step()
        job.notify("step", step)
    job.notify("end")
    return [each.detach().clone() for each in model.parameters()], torch.rand(3)


def test_gradients_of_every_bucket_are_measured_and_training_is_the_same(job, group):
    before, drawn = trained(job, group, probe=False)
    job.change("compress:probe")
    after, drawn_with_probe = trained(job, group, probe=True)
    assert all(torch.equal(*each) for each in zip(before, after))
    assert torch.equal(drawn, drawn_with_probe)
    assert "3 buckets" in job.places()[0]["where"]
    rows = json.loads((job.folder / "codecs.json").read_text())
    assert len(rows) == 3 * STEPS * len(CODECS)
    assert {each["bucket"] for each in rows} == {0, 1, 2}
    assert all(0 <= each["square_error"] <= each["square_norm"] for each in rows)
    assert all(each["elements"] == 256 and each["encode_ns"] > 0 for each in rows)


def test_without_ddp_there_is_nothing_to_measure(job):
    job.change("compress:probe")
    job.steps(*range(1, 9))
    assert "no module in DistributedDataParallel" in job.refused()


def test_a_codec_that_fails_ends_the_probe_and_not_the_job(job, group, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(CODECS, "to=bf16", CODECS["to=bf16"]._replace(encode=fails))
    job.change("compress:probe")
    trained(job, group, probe=True)
    assert "out of memory" in job.refused()


def test_the_trace_of_a_known_hessian_is_found():
    # Loss (x1^2 + 2 x2^2 + ... + 6 x6^2) / 2: the Hessian is diagonal, so that every sign gives its trace.
    weight = torch.nn.Parameter(torch.randn(2, 3))
    linear = torch.nn.Parameter(torch.randn(2, 2))
    factors = torch.arange(1.0, 7).reshape(2, 3)
    loss = (factors * weight.square()).sum() / 2 + linear.sum()
    assert traces(loss, {"a": weight, "b": linear}, seed=0) == {"a": [21.0] * 4, "b": [0.0] * 4}
    loss.backward()  # the graph is still there
    assert torch.allclose(weight.grad, factors * weight.detach())


def test_the_trace_of_a_full_hessian_is_found_on_average():
    torch.manual_seed(1)
    a = torch.randn(8, 8)
    a = a @ a.T
    weight = torch.nn.Parameter(torch.randn(8, 1))
    loss = (weight.T @ a @ weight).sum() / 2
    found = [each for seed in range(200) for each in traces(loss, {"w": weight}, seed)["w"]]
    assert sum(found) / len(found) == pytest.approx(float(a.trace()), rel=0.05)


def test_rounding_keeps_what_the_precision_can_hold():
    weight = torch.tensor([[1.0, -0.5, 127.0], [0.01, 0.02, 1.27]])
    assert torch.allclose(round_to(weight, "int8"), torch.tensor([[1.0, 0.0, 127.0], [0.01, 0.02, 1.27]]))
    assert torch.equal(round_to(torch.tensor([[448.0, 1.0, 1.06]]), "fp8"), torch.tensor([[448.0, 1.0, 1.0]]))
    assert torch.equal(round_to(torch.tensor([[1 + 2**-9, 2.0]]), "bf16"), torch.tensor([[1.0, 2.0]]))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        calls.append(1)
        return 2 * gradient


calls: list[int] = []


def fitted(job, custom=False):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, BEGINS_AT_STEP + STEPS + 3):
        optimizer.zero_grad()
        out = model(torch.randn(16, 4))
        job.backward((Doubled.apply(out) if custom else out).square().mean())
        optimizer.step()
        job.notify("step", step)
    job.notify("end")
    return [each.detach().clone() for each in model.parameters()], torch.rand(3)


@pytest.mark.parametrize("custom", [False, True])
def test_sensitivities_are_measured_and_training_is_the_same(job, custom):
    before, drawn = fitted(job, custom)
    calls.clear()
    job.change("precision:probe")
    after, drawn_with_probe = fitted(job, custom)
    assert all(torch.equal(*each) for each in zip(before, after))
    assert torch.equal(drawn, drawn_with_probe)
    assert len(calls) == custom * (BEGINS_AT_STEP + STEPS + 2)  # the script's own backward ran once a step
    assert job.places()[0]["where"] == "2 weights"
    rows = json.loads((job.folder / "sensitivities.json").read_text())
    assert {(each["module"], each["precision"]) for each in rows} == {
        (module, precision) for module in ("first", "second") for precision in PRECISIONS
    }
    assert {each["method"] for each in rows} == {"fisher" if custom else "hutchinson"}
    assert all(each["trace"] > 0 and each["batches"] == STEPS for each in rows)
    by_bits = {each["precision"]: each["square_error"] for each in rows if each["module"] == "first"}
    assert by_bits["fp16"] < by_bits["bf16"] < by_bits["int8"] < by_bits["fp8"]
