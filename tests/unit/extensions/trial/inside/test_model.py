"""Changes around the model: autocast and the compiler."""

import copy
import shutil

import pytest

torch = pytest.importorskip("torch")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, value):
        self.dtype = (value @ self.inner.weight).dtype
        return {"out": [torch.relu(self.inner(value))], "text": "unchanged"}


def train(job, model, steps, inputs=None):
    torch.manual_seed(0)
    inputs = torch.randn(2, 8)
    for step in steps:
        out = model(inputs)["out"][0]
        job.backward(torch.nn.functional.mse_loss(out, torch.ones(2, 8)))
        job.notify("step", step)
    return out


def test_the_model_runs_under_autocast_and_returns_float32(job):
    model = Model()
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(torch.randn(2, 8))["out"][0].float()
    job.change("autocast:dtype=bf16")
    found = train(job, model, range(1, 5))
    assert model.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert model(torch.randn(2, 8))["text"] == "unchanged"
    assert not torch.is_autocast_enabled("cpu")
    assert job.places() == [{"where": "Model", "instead_of": "", "times": 1}]


def test_a_copy_of_the_model_runs_under_autocast_by_itself(job):
    model = Model()
    job.change("autocast:dtype=bf16")
    train(job, model, range(1, 5))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.fill_(3)
    assert torch.equal(twin(torch.ones(1, 8))["out"][0], torch.full((1, 8), 3.0))


def test_autocast_ends_where_the_model_raises(job):
    model = Model()
    job.change("autocast:dtype=bf16")
    train(job, model, range(1, 5))
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 9))
    assert not torch.is_autocast_enabled("cpu")


def test_a_script_with_autocast_of_its_own_is_refused(job):
    job.change("autocast:dtype=bf16")
    with torch.autocast("cpu", torch.float16):
        train(job, Model(), range(1, 5))
    [said] = job.said()
    assert "under autocast itself" in said["refused"][0]


def test_only_what_the_loop_calls_for_training_is_changed(job):
    job.change("autocast:dtype=bf16")
    model, unused = Model(), Model()
    unused.eval()
    with torch.no_grad():
        unused(torch.ones(1, 8))
    train(job, model, range(1, 5))
    assert len(job.places()) == 1
    assert not unused._forward_hooks
    assert not model.inner._forward_hooks


def test_modules_are_called_as_before_once_the_first_steps_are_over(job):
    before = torch.nn.Module.__call__
    job.change("autocast:dtype=bf16", "compile")
    assert torch.nn.Module.__call__ is not before
    job.steps(1)
    assert torch.nn.Module.__call__ is not before
    job.steps(2)
    assert torch.nn.Module.__call__ is before


def test_a_job_that_calls_no_module_is_not_changed(job):
    job.change("autocast:dtype=bf16")
    job.steps(1, 2, 3)
    assert "called a trainable module" in job.refused()


def test_a_model_that_the_script_compiles_is_left_alone(job):
    job.change("autocast:dtype=bf16")
    model = Model()
    model.compile(backend="eager")
    train(job, model, range(1, 5))
    assert "compiles its model itself" in job.refused()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs one for C++")
def test_a_compiled_model_under_autocast_computes_the_same(job):
    job.change("compile", "autocast:dtype=bf16")
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    found = train(job, model, range(1, 6))
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(0)
        expected = plain(torch.randn(2, 8))["out"][0].float()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    by_edit = {change["edit"]: change for change in job.said()}
    assert by_edit["compile"]["refused"] == []
    assert by_edit["compile"]["applied"][0]["where"] == "Model"
    assert by_edit["autocast:dtype=bf16"]["refused"] == []
