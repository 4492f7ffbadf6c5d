"""Real two-rank jobs that pay in every step for what an update needs once or not at all."""

from __future__ import annotations

import pytest

from dpro.analysis.analysis import Analysis
from dpro.verdict.facts import facts_of
from dpro.verdict.ranking import advise
from tests.jobs import TORCHRUN, record, script

pytest.importorskip("torch")

OF_EACH_STEP = ("compilation", "checkpoint", "collection", "reduce-last", "coalesce")
HEAD = """
    import contextlib
    import torch.distributed as dist
    from torch.nn import Linear, ReLU, Sequential
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = Sequential(*[layer for _ in range(3) for layer in (Linear(512, 512), ReLU())])
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    def backward(passes=1, model=model, size=64, once=False):
        optimizer.zero_grad()
        for number in range(passes):
            last = not once or number == passes - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(torch.randn(size, 512)).square().mean()
                loss.backward()
        return loss.detach()
    def update(**options):
        loss = backward(**options)
        optimizer.step()
        return loss
"""
# What each step does, and which advice says so; none where nothing is wrong.
JOBS = {
    "reduces in each of four passes": ("update(passes=4)", "reduce-last"),
    "reduces in the last of four passes": ("update(passes=4, once=True)", ""),
    "reduces once": ("update()", ""),
    "reads its loss": ("update().item()", ""),
    "collects": ("update(); import gc; gc.collect()", "collection"),
    "saves": ("update(); rank or torch.save(net.state_dict(), 'saved.pt')", "checkpoint"),
    "gathers numbers one by one": (
        "loss = update().reshape(1)\n"
        "for _ in range(30): dist.all_gather([torch.empty(1) for _ in range(ranks)], loss); loss.item()",
        "coalesce",
    ),
    "gathers objects": (
        "loss = update().item()\nfor name in range(20): dist.all_gather_object([None] * ranks, {name: loss})",
        "coalesce",
    ),
    "broadcasts buffers one by one": (
        "update()\nfor _ in range(30): dist.broadcast(torch.zeros(64), 0)",
        "coalesce",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_what_is_paid_for_in_every_step_is_advised_against_and_nothing_else(job, tmp_path):
    does, kind = JOBS[job]
    body = HEAD + "    for step in range(60):\n" + "".join(f"        {line}\n" for line in does.splitlines())
    run, done = record(
        tmp_path, [*TORCHRUN, script(tmp_path, body + "    dist.destroy_process_group()\n")[1]]
    )
    assert done.returncode == 0, done.stderr.decode()
    analysis = Analysis(run)
    with facts_of(analysis) as facts:
        advised = [each for each in advise(facts, "communication") if each.kind in OF_EACH_STEP]
    assert [each.kind for each in advised] == ([kind] if kind else [])
    assert all(each.gain_high > 1.1 for each in advised)
