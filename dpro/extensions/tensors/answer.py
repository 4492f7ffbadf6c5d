"""The result of a search for a tensor plan, as a document and in words."""

from __future__ import annotations

from pathlib import Path

from dpro.analysis.answers.whatif import WhatIfDocument
from dpro.documents import DocumentPart, finite
from dpro.extensions.tensors.joint import PlanSearch
from dpro.extensions.tensors.plan_file import TensorPlan
from dpro.units import ms


class TriedEdits(DocumentPart, frozen=True):
    """Edits with which divisions of gradients were searched.

    Attributes:
        edits: as `--edit` accepts them; empty for the job as it is.
        step_ms: the mean step with the best division, for the current number of samples.
        kept: whether the plan includes them.
    """

    edits: list[str]
    step_ms: float | None
    kept: bool


class MadePlan(DocumentPart, frozen=True):
    """A tensor plan that was searched for.

    Attributes:
        file: path that it was written to.
        reductions: number of its reductions.
        step_ms: the mean step with it.
        uniform: the best single size for all buckets with the plan's edits, as `--edit` accepts it; empty
            where none was replayed.
        uniform_ms: the mean step with `uniform`.
        replays: number of divisions that were replayed.
        interrupted: whether the keyboard ended the search early; the plan is the best one found until then.
        tried: edits that were tried with it.
    """

    file: str
    reductions: int
    step_ms: float | None
    uniform: str
    uniform_ms: float | None
    replays: int
    interrupted: bool
    tried: list[TriedEdits]


class MadePlanDocument(WhatIfDocument, frozen=True, kw_only=True):
    """A tensor plan that was searched for, and the prediction of the usual step with it.

    Attributes:
        made_plan: the plan, and how it was found.
    """

    made_plan: MadePlan


def search_document(path: Path, plan: TensorPlan, search: PlanSearch) -> MadePlan:
    """Describe the result of a search.

    Args:
        path: path that the plan was written to.
    """
    chosen, replays = search.best()
    size, uniform_ns = search.uniform()
    return MadePlan(
        file=str(path),
        reductions=len(plan.reductions),
        step_ms=ms(replays.best_ns),
        uniform=f"bucket:mb={size:g}" if size else "",
        uniform_ms=finite(ms(uniform_ns)),
        replays=search.made,
        interrupted=search.is_interrupted,
        tried=[
            TriedEdits(list(map(str, edits)), finite(ms(of_edits.best_ns)), set(edits) <= set(chosen))
            for edits, of_edits in search.tried
        ],
    )


def lines_of(made: MadePlan) -> list[str]:
    """Return lines on how a plan was found, and how it compares with a single size for all buckets."""
    ended = "interrupted; this is the best until then" if made.interrupted else "done"
    lines = [f"Search {ended}: {made.replays} divisions were replayed."]
    if made.uniform_ms and made.step_ms is not None:
        less = 100 * (1 - made.step_ms / made.uniform_ms)
        than = f"the best size for all buckets ({made.uniform}, {made.uniform_ms:.2f} ms)"
        lines.append(f"The plan's step is {less:.1f}% shorter than with {than}." if less >= 0.05 else
                     f"The plan gains nothing over {than}.")  # fmt: skip
    for tried in made.tried:
        if tried.edits and tried.step_ms is not None:
            said = "kept" if tried.kept else "not kept"
            lines.append(f"With {' + '.join(tried.edits)}: {tried.step_ms:.2f} ms, {said}.")
    return [*lines, f"Written: {made.file} ({made.reductions} reductions)"]
