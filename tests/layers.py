"""A job whose model is a stack of equal layers: a GPT on the CPU, in one process."""

from __future__ import annotations

import sys
from pathlib import Path

from dpro.store import Run
from tests.jobs import TINY, record

LAYERS, WIDTH, HEADS, WIDE, VOCABULARY, BATCH, LENGTH = 3, 32, 4, 96, 64, 2, 8
GPT = (
    TINY
    + f"""
from torch.nn import functional as F

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = torch.nn.Linear({WIDTH}, 3 * {WIDTH})
        self.output = torch.nn.Linear({WIDTH}, {WIDTH})
        self.up, self.down = torch.nn.Linear({WIDTH}, {WIDE}), torch.nn.Linear({WIDE}, {WIDTH})

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, ({HEADS}, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))

table = torch.nn.Embedding({VOCABULARY}, {WIDTH})
layers = [Layer() for _ in range({LAYERS})]
model = torch.nn.Sequential(table, *layers, torch.nn.Linear({WIDTH}, {VOCABULARY}))
optimizer = Descent(model.parameters())
for _ in range(12):
    optimizer.zero_grad()
    logits = model(torch.zeros({BATCH}, {LENGTH}, dtype=torch.long))
    logits.sum().backward()
    optimizer.step()
"""
)
OPTIONS = ("--shapes", "--skip", "4", "--every", "1000", "--window-steps", "4")


def recorded(folder: Path) -> Run:
    """The job's run, recorded into `folder/run`."""
    (folder / "job.py").write_text(GPT)
    run, done = record(folder, [sys.executable, "job.py"], *OPTIONS)
    assert done.returncode == 0, done.stderr
    return run
