"""An engine that a fixed number of clients keep busy: its tokens per second, in closed form.

In: the cost of an iteration, clients that each send their next request when the one before has ended, and the
lengths of requests. Out: seconds per token and until the first token. All iterations are taken as equal: each
holds a decode of every client, and the prompts' share. Where requests wait for more than a few iterations
(more clients than the batch holds, or no memory left), use `engine.serve` instead.
"""

from __future__ import annotations

from dpro.replay.serving.engine import IterationCost
from dpro.replay.serving.fit import seconds


def token_s(cost: IterationCost, clients: float, prompt: float, output: float) -> float:
    """Seconds from one token of a request to the next.

    In the time of one request's output each client sends one prompt, so an iteration holds clients / output
    prompts on average; a prompt is multiplied beside decodes, so that the weights are read anyway.

    Args:
        cost: of an iteration.
        clients: that send requests, one after the other.
        prompt: tokens of a prompt.
        output: tokens of an output.
    """
    import numpy as np

    one, none = np.ones(1), np.zeros(1)
    decoding = seconds(cost, none, clients * one, clients * (prompt + output / 2) * one, none)[0]
    return float(decoding + clients / output * (prompt * cost.token_s + prompt * prompt / 2 * cost.pair_s))


def with_clients(
    cost: IterationCost,
    measured: tuple[float, float],
    prompt: float,
    output: float,
    clients: tuple[float, float],
) -> tuple[float, float]:
    """Seconds per token and until the first one, with another number of clients.

    A first token takes a number of iterations that hardly changes, each of which takes longer: so it grows as
    the time per token does.

    Args:
        cost: of an iteration, in proportion.
        measured: seconds per token and until the first token, with the first number of clients.
        prompt: tokens of a prompt.
        output: tokens of an output.
        clients: as measured, and as asked.
    """
    here, there = (token_s(cost, each, prompt, output) for each in clients)
    return measured[0] * there / here, measured[1] * there / here
