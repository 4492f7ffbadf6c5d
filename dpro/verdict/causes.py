"""Why a limit limits: what was found in the run, with names and numbers from it.

In: `JobFacts`. Out: a few words, or nothing where the run does not show it.
"""

from __future__ import annotations

from dpro.units import format_duration
from dpro.verdict.facts import JobFacts
from dpro.verdict.kernel_names import short_kernel
from dpro.verdict.limits import COMMUNICATION, COMPUTE, HOST


def cause_of(facts: JobFacts, limit: str) -> str:
    """What is behind a limit, in words; empty where the run does not show it."""
    if limit == HOST:
        still = facts.still
        if still is None:
            return _launching(facts)
        ranks = len(facts.job.graph.ranks)
        return (
            f"hosts stand still for {still.share:.0%} of it, {still.at_once:.0f} of {ranks} at a time: "
            "they do not get a core"
        )
    if limit == COMPUTE:
        longest = facts.computing_kernels["name"].head(2)
        return ", ".join(f"{short_kernel(name)} {facts.share_of([name]):.0%}" for name in longest)
    if limit == COMMUNICATION:
        return ", ".join(map(short_kernel, facts.communication_kernels["name"].head(1)))
    return ""


def _launching(facts: JobFacts) -> str:
    dear = facts.dear
    if dear is not None:
        took = format_duration(dear.took_ns)
        return f"{dear.per_step:.0f} launches of {short_kernel(dear.kernel)} take {took} of the host each"
    launches = facts.launches.height / facts.rank_steps
    gpu_ns = float(facts.kernels["total_ns"].sum()) / facts.rank_steps
    if not launches:
        return ""
    return f"{launches:,.0f} launches a rank for {format_duration(gpu_ns)} of kernels"
