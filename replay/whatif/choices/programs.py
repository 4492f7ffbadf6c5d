"""Integer programs: one option for each of several things, so that errors stay within a budget.

In: what each option of each thing costs, and its error. Out: the options. `assign` adds costs up;
`assign_in_pipeline` is for buckets of gradients, which are compressed on one thread and moved over one link:
what is hidden behind the backward pass costs nothing, so that nothing is lost there for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable

TIME_LIMIT_S = 20.0
GAP = 1e-6  # of the optimum, at which the search ends
TIE = 1e-4  # of the whole cost: worth the whole budget, so that equally fast options lose the least


def assign(costs: Floats, errors: Floats, budget: float) -> Ints:
    """Choose an option for each thing at the least sum of costs (multiple-choice knapsack).

    Args:
        costs: [N, C]; infinite where there is no such option.
        errors: [N, C], none negative; their sum has to stay within the budget.

    Returns:
        [N] the option of each.

    Raises:
        Unanswerable: no choice stays within the budget.
    """
    things, options = costs.shape
    scale = max(float(np.abs(costs[np.isfinite(costs)]).max(initial=0.0)) * things, 1e-12)
    program = _Program(costs, errors, budget, things * options)
    program.costs[:] = np.where(program.usable, costs.ravel(), 0.0) / scale + program.ties
    return program.solved()


@dataclass(frozen=True)
class ReductionPipeline:
    """Buckets of gradients in the order of their reductions, ns.

    Attributes:
        ready: [B] when the gradients of each are there, if nothing is compressed.
        thread: [B, C] how much longer each option keeps the thread that calls.
        fixed: [B, C] time of its reduction during which others may use the link.
        moving: [B, C] time of the link.
        workers: how many reductions run side by side.
    """

    ready: Floats
    thread: Floats
    fixed: Floats
    moving: Floats
    workers: int


def assign_in_pipeline(buckets: ReductionPipeline, errors: Floats, budget: float) -> Ints:
    """Choose an option for each bucket so that the last reduction ends first.

    With `t` the thread's extra time so far and `f` the end of a reduction, for each bucket `b`:
    `t_b = t_(b-1) + thread`, `f_b >= ready_b + t_b + fixed + moving`, `f_b >= f_(b-1) + moving`, and
    `f_b >= f_(b-workers) + fixed + moving`.

    Args:
        errors: [B, C], none negative; their sum has to stay within the budget.

    Returns:
        [B] the option of each.

    Raises:
        Unanswerable: no choice stays within the budget.
    """
    count, options = errors.shape
    chosen = count * options
    duration_ns = buckets.fixed + buckets.moving
    scale = max(
        float(buckets.ready.max() + duration_ns.max(axis=1).sum() + buckets.thread.max(axis=1).sum()), 1e-9
    )
    program = _Program(np.zeros_like(errors), errors, budget, chosen + 2 * count)
    program.costs[:chosen] = program.ties
    program.costs[chosen + 2 * count - 1] = 1.0
    for b in range(count):
        variables = range(b * options, (b + 1) * options)
        thread, end = chosen + b, chosen + count + b
        before = {thread - 1: 1.0} if b else {}
        program.require({thread: 1.0} | _less(before, zip(variables, buckets.thread[b] / scale)), 0.0, 0.0)
        done = _less({thread: 1.0}, zip(variables, duration_ns[b] / scale))
        program.require({end: 1.0} | done, float(buckets.ready[b]) / scale)
        if b:
            program.require(
                {end: 1.0} | _less({end - 1: 1.0}, zip(variables, buckets.moving[b] / scale)), 0.0
            )
        if b >= buckets.workers:
            other = {end - buckets.workers: 1.0}
            program.require({end: 1.0} | _less(other, zip(variables, duration_ns[b] / scale)), 0.0)
    return program.solved()


def _less(variables: dict[int, float], terms: Iterable[tuple[int, Any]]) -> dict[int, float]:
    """Coefficients of variables, and of options with what they take, that are subtracted."""
    return {name: -float(value) for name, value in (*variables.items(), *terms)}


class _Program:
    """A program whose first variables are [N, C] choices of one option each.

    Attributes:
        costs: of all variables, to be set.
        ties: [N C] costs by which equally good options differ.
        usable: [N C] options that there are.
    """

    def __init__(self, costs: Floats, errors: Floats, budget: float, variables: int) -> None:
        self._things, self._options = errors.shape
        self.usable = np.isfinite(costs).ravel() & np.isfinite(errors).ravel()
        shares = np.where(self.usable, errors.ravel(), 0.0) / max(budget, 1e-300)
        self.ties = TIE * np.minimum(shares, 1.0) / self._things
        self.costs = np.zeros(variables)
        self._rows: list[dict[int, float]] = []
        self._limits: list[tuple[float, float]] = []
        for thing in range(self._things):
            choices = range(thing * self._options, (thing + 1) * self._options)
            self.require(dict.fromkeys(choices, 1.0), 1.0, 1.0)
        self.require(dict(enumerate(shares.tolist())), -np.inf, 1.0)
        self.usable &= shares <= 1.0

    def require(self, terms: dict[int, float], least: float, most: float = np.inf) -> None:
        """Have a sum of variables times coefficients stay within a range."""
        self._rows.append(terms)
        self._limits.append((least, most))

    def solved(self) -> Ints:
        """The option of each thing.

        Raises:
            Unanswerable: there is no solution.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        entries = [
            (row, variable, value)
            for row, terms in enumerate(self._rows)
            for variable, value in terms.items()
        ]
        rows, columns, values = (np.array(entry) for entry in zip(*entries))
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), self.costs.size))
        least, most = np.array(self._limits).T
        choices = self._things * self._options
        upper = np.full(self.costs.size, np.inf)
        upper[:choices] = self.usable
        integral = np.zeros(self.costs.size)
        integral[:choices] = 1
        solution = milp(
            self.costs,
            integrality=integral,
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(matrix, least, most),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
        )
        if solution.x is None:
            raise Unanswerable("no choice stays within the budget of errors: allow more")
        chosen: Ints = solution.x[:choices].reshape(self._things, self._options).argmax(axis=1)
        return chosen
