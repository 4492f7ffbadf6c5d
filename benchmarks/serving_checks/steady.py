"""An engine that a fixed number of clients keep busy: its tokens per second, in closed form.

In: the cost of an iteration, clients that each send their next request when the one before has ended, and
the lengths of requests. Out: seconds per token and, in proportion to a measurement, until the first token.
All iterations are assumed equal: each has a decode of every client, and the prompts' share. Where requests
wait for more than a few iterations (more clients than the batch has room for, or no memory left), use
`engine.serve` instead.
"""

from __future__ import annotations

from dpro.extensions.serving.engine import IterationCost
from dpro.extensions.serving.fit import seconds


def token_s(cost: IterationCost, clients: float, prompt: float, output: float) -> float:
    """Compute the seconds from one token of a request to the next.

    In the time of one request's output each client sends one prompt, so an iteration has clients / output
    prompts on average; a prompt is multiplied beside decodes, so that the weights are read anyway.

    Args:
        prompt: tokens of a prompt.
        output: tokens of an output.
    """
    import numpy as np

    one, none = np.ones(1), np.zeros(1)
    decoding = seconds(cost, none, clients * one, clients * (prompt + output / 2) * one, none)[0]
    return float(decoding + clients / output * (prompt * cost.token_s + prompt * prompt / 2 * cost.pair_s))


def prompt_s(cost: IterationCost, prompt: float) -> float:
    """Compute the seconds that a prompt takes alone.

    Args:
        prompt: its tokens.
    """
    import numpy as np

    one, none = np.ones(1), np.zeros(1)
    return float(seconds(cost, prompt * one, none, none, prompt * prompt / 2 * one)[0])


def first_token_s(
    measured: tuple[float, float], here: tuple[float, float], there: tuple[float, float]
) -> float:
    """Predict the seconds until the first token, of another server or with other clients.

    The request's own prompt takes a part of the measured time, which scales as a prompt alone does. For the
    rest it waits for iterations of others, which scale as the time per token does.

    Args:
        measured: seconds per token and until the first one.
        here, there: computed for the measured server and for the other one: seconds per token, and of a
            prompt alone.
    """
    token, first = measured
    own = min(here[1] * token / here[0], first)
    return own * there[1] / here[1] + (first - own) * there[0] / here[0]
