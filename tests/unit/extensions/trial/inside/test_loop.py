"""Changes to the training loop: its passes, batches, the values that it reads, a late rank."""

import time

import pytest

torch = pytest.importorskip("torch")

from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, TensorDataset  # noqa: E402

from dpro.extensions.trial.inside import waits  # noqa: E402


class Counting:
    """A training loop that counts updates."""

    def __init__(self, job, model, inputs):
        self.job, self.model, self.inputs = job, model, inputs
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.updates, self.gradients = 0, []
        self.optimizer.register_step_post_hook(self.on_update)

    def on_update(self, *_):
        self.updates += 1
        self.gradients.append([parameter.grad.clone() for parameter in self.model.parameters()])
        self.job.notify("step", self.updates)

    def run(self, passes):
        for index in range(passes):
            self.optimizer.zero_grad()
            self.job.backward(self.model(self.inputs[index]).pow(2).mean())
            self.optimizer.step()


def test_an_accumulated_step_has_the_mean_of_the_gradients_of_its_passes(job):
    job.change("accumulate:steps=2")
    model, inputs = torch.nn.Linear(4, 4), torch.randn(8, 3, 4)
    loop = Counting(job, model, inputs)
    loop.run(2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loop.inputs = inputs[2:]
    loop.run(2)
    assert loop.updates == 3
    twin = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), before, strict=True):
            mine.copy_(theirs)
    mean = sum(twin(each).pow(2).mean() for each in inputs[2:4]) / 2
    for found, expected in zip(
        loop.gradients[-1], torch.autograd.grad(mean, [*twin.parameters()]), strict=True
    ):
        torch.testing.assert_close(found, expected)
    assert job.places()[0]["where"].startswith("SGD at test_loop.py:")


@pytest.mark.usefixtures("group")
def test_ddp_reduces_gradients_in_the_last_pass_only(job):
    job.change("accumulate:steps=3")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    reduced = []
    model.register_comm_hook(None, reducing(reduced))
    Counting(job, model, torch.randn(8, 3, 4)).run(8)
    assert len(reduced) == 2 + 2


def reducing(reduced):
    def hook(_state, bucket):
        reduced.append(bucket.index())
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return hook


@pytest.mark.usefixtures("group")
def test_a_script_that_accumulates_itself_is_refused(job):
    job.change("accumulate:steps=2")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with model.no_sync():
        Counting(job, model, torch.randn(1, 3, 4)).run(1)
    assert "accumulates gradients itself, with no_sync() at test_loop.py:" in job.refused()


def test_two_optimizers_are_refused_with_the_code_to_write(job):
    job.change("accumulate:steps=2")
    model = torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    job.steps(1, 2)
    for _ in range(2):
        job.backward(model(torch.ones(1, 4)).sum())
        for optimizer in optimizers:
            optimizer.step()
    assert "several optimizers update" in job.refused()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in optimizers:
        optimizer.zero_grad()
    job.backward(model(torch.ones(1, 4)).sum())
    for optimizer in optimizers:
        optimizer.step()  # as the script says: no scaled loss, no update left out
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old - 0.1)
    assert "with model.no_sync()" in job.refused()


def test_a_closure_is_refused_and_called(job):
    job.change("accumulate:steps=2")
    model, called = torch.nn.Linear(4, 4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.steps(1, 2)

    def closure():
        called.append(1)
        return model(torch.ones(1, 4)).sum()

    optimizer.step(closure)
    assert called
    assert "closure" in job.refused()


def numbers(length):
    return TensorDataset(torch.arange(float(length)))


def test_batches_have_so_many_times_as_many_samples(job):
    job.change("batch:factor=1.5")
    loader = DataLoader(numbers(12), batch_size=4)
    assert [len(each) for (each,) in loader] == [6, 6]
    assert job.places()[0]["instead_of"] == "batch_size=4"


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(numbers(4), batch_size=None), "the dataset creates the batches"),
        (lambda: DataLoader(numbers(4), batch_sampler=[[0, 1]]), "a batch_sampler creates the batches"),
        (lambda: DataLoader(numbers(4), batch_size=3), "not a whole number of samples"),
    ],
)
def test_batches_that_cannot_be_enlarged_are_refused(job, loader, reason):
    job.change("batch:factor=1.5")
    assert list(loader())
    assert reason in job.refused()


def test_the_same_batch_is_returned_again_as_often_as_there_are_batches(job):
    job.change("hide-input")
    found = []
    loader = DataLoader(numbers(8), batch_size=1)
    for step, (batch,) in enumerate(loader):
        found.append(float(batch))
        job.notify("step", step + 1)
    found += [float(batch) for (batch,) in loader]
    assert found == [0, 1, 2] + [2] * 5 + [2] * 8
    with torch.no_grad():
        assert [float(batch) for (batch,) in loader] == [*range(8)]
    assert job.places() == [{"where": "DataLoader", "instead_of": "", "times": 1}]


def test_batches_that_are_changed_in_place_are_not_returned_again(job):
    job.change("hide-input")
    found = []
    for step, (batch,) in enumerate(DataLoader(numbers(6), batch_size=1)):
        found.append(float(batch))
        batch.add_(100)
        job.notify("step", step + 1)
    assert found == [*range(6)]
    assert "changes its batches in place" in job.refused()


def test_a_loader_without_a_length_is_left_alone(job):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(6)

    job.change("hide-input")
    found = []
    for step, batch in enumerate(DataLoader(Stream(), batch_size=1)):
        found.append(int(batch))
        job.notify("step", step + 1)
    assert found == [*range(6)]
    assert "does not know how many batches" in job.refused()


def test_a_value_is_read_a_step_late_call_by_call(job, monkeypatch):
    monkeypatch.setattr(waits, "is_elsewhere", lambda tensor: True)
    monkeypatch.setattr(waits, "start_copy", lambda tensor: tensor.clone().tolist)
    job.change("no-sync")
    found = []
    for step in range(6):
        found.append([torch.tensor(value).item() for value in (step, 10 * step)])
        job.notify("step", step + 1)
    # Late from the second step on in which copies are made: each call returns what it did in the step before.
    assert found == [[0, 0], [1, 10], [2, 20], [2, 20], [3, 30], [4, 40]]
    assert len(job.places()) == 1


def test_values_on_the_cpu_are_read_at_once(job):
    job.change("no-sync")
    found = []
    for step in range(5):
        found.append(torch.tensor(step).item())
        job.notify("step", step + 1)
    assert found == [*range(5)]
    assert "reads nothing from a GPU" in job.refused()


def test_a_rank_sleeps_once_in_each_step(job, monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    job.change("slow:rank=0,ms=20")
    for step in range(3):
        job.notify("work")
        job.notify("work")
        job.notify("step", step + 1)
    job.notify("work")
    assert slept == [0.02] * 3
    assert job.places()[0]["where"] == "each step"


def test_a_rank_that_the_job_has_not_is_refused(job):
    job.change("slow:rank=3,ms=1")
    job.steps(1)
    assert "there is no rank 3" in job.refused()
