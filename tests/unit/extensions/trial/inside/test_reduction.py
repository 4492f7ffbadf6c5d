"""The hook that exchanges the largest gradients: what it leaves out comes later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from dpro.extensions.trial.inside.reduction import PLAIN_STEPS, top_k  # noqa: E402


@pytest.fixture
def group() -> Iterator[Any]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Bucket:
    """As DDP hands it to a hook, the only one of its pass."""

    def __init__(self, gradients: Any) -> None:
        self.gradients = gradients

    def buffer(self) -> Any:
        return self.gradients

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def test_the_largest_gradients_are_exchanged_and_the_others_wait(group):
    hook = top_k(group, 0.25)
    torch.manual_seed(0)
    given, exchanged = torch.zeros(40), torch.zeros(40)
    for step in range(PLAIN_STEPS + 20):
        gradients = torch.randn(40)
        given += gradients
        reduced = hook(None, Bucket(gradients.clone())).wait()
        reduced = reduced[0] if isinstance(reduced, list) else reduced
        assert int((reduced != 0).sum()) == (40 if step < PLAIN_STEPS else 10)
        exchanged += reduced
    left = given - exchanged
    assert float(left.abs().max()) < float(given.abs().max())
    # What was never exchanged is what the hook still holds: with nothing more to come it all goes out.
    for _ in range(4):
        exchanged += hook(None, Bucket(torch.zeros(40))).wait()
    assert torch.allclose(exchanged, given, atol=1e-5)


def test_all_of_the_gradients_are_what_a_plain_reduction_gives(group):
    hook = top_k(group, 1.0)
    for _ in range(PLAIN_STEPS + 3):
        gradients = torch.randn(17)
        assert torch.allclose(hook(None, Bucket(gradients.clone())).wait(), gradients)
