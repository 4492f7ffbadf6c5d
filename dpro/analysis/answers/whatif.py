"""The answers of `dpro whatif`: given edits, a search, sensitivity, and time against memory.

Takes an `Analysis`, and edits; returns documents, and the predictions behind them.

Time against memory compares ways to run the job: larger batches, recomputed activations, accumulated
gradients. A point is best if no other one takes less time without more memory, or less memory without more
time. Memory is the peak that a step allocates beyond what was allocated at its start; time is that of a batch
of the recorded size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import polars as pl
from msgspec import UNSET, UnsetType

from dpro.account import AccountedDocument
from dpro.analysis import graphs
from dpro.analysis.analysis import Analysis
from dpro.analysis.cached import cached
from dpro.analysis.end import JobEnd
from dpro.analysis.graphs import condensed_job, fingerprint, why_too_large
from dpro.analysis.mean_step import inputs_per_s
from dpro.analysis.predictions import OTHER_LOAD, calibrated, predict_edits, trust_and_baseline
from dpro.cache import cache_folder, keep_latest
from dpro.documents import Document, DocumentPart, finite, plain
from dpro.errors import DproError, Unanswerable
from dpro.folders import written_whole
from dpro.processes import process_pool
from dpro.replay.cost.kernels.formula import FILE as COEFFICIENTS
from dpro.replay.cost.memory import footprint_of, freed_by_recomputing
from dpro.replay.fidelity.accuracy import Trust, TrustDocument, taken_out_in_words, trust_document
from dpro.replay.graph import Graph
from dpro.replay.pretended import PretendedStep
from dpro.replay.steps import series_outside
from dpro.replay.timeline import durations_of
from dpro.replay.whatif.edit import EFFORTS, Edit
from dpro.replay.whatif.edits.scaling import Accumulate, Batch, Recompute
from dpro.replay.whatif.graph_ops.scope import blocks_of_run
from dpro.replay.whatif.predict import Prediction, Refusal, baseline_steps, measured_ns, predict, ranked
from dpro.replay.whatif.registry import all_kinds, parse_edit
from dpro.replay.whatif.search import BUDGET, Interaction, SearchResult, SmallGain, explore
from dpro.replay.whatif.sensitivity import Curve, sensitivity
from dpro.schema import SPANS
from dpro.selection import ALL, Selection, SelectionDocument, selection_document
from dpro.stages import Progress, ignore
from dpro.store import Run
from dpro.topology.file import FILE as TOPOLOGY
from dpro.topology.kept import PATHS as PATHS
from dpro.units import format_duration, ms

if TYPE_CHECKING:
    from dpro.replay.whatif.predict import Prediction

FACTORS = (2, 4)
MIN_DIFFERENCE = 0.05  # share of a step: a larger difference of steps outside deep windows is reported
UNLIMITED_GB = 1e6  # so that edits are not refused: `ParetoPoint.fits` says whether the memory suffices


class ParetoPoint(DocumentPart, frozen=True):
    """One way to run the job: its time and its memory.

    Attributes:
        edits: edits; empty for the job as it is.
        ms_per_batch: mean time for a batch of the recorded size.
        speedup: throughput in samples per second over that of the job as it is.
        within_step_bytes: peak that a step allocates beyond what was allocated at its start.
        fits: whether the memory suffices; null if the run does not show it.
        best: whether no other point takes less time or memory without more of the other.
    """

    edits: list[str]
    ms_per_batch: float
    speedup: float | None
    within_step_bytes: int
    fits: bool | None
    best: bool


def pareto(graph: Graph, trust: Trust) -> list[ParetoPoint]:
    """Return time against memory for several ways to run the job, the least memory first.

    Raises:
        Unanswerable: the run has no allocations, or no whole step.
    """
    footprint = footprint_of(graph.run)
    baseline = baseline_steps(graph)
    base = float(durations_of(baseline)["duration_ns"].to_numpy().mean())
    ways: list[tuple[tuple[Edit, ...], float, int]] = [((), base, footprint.within_step_bytes)]
    for edits, within in _ways(graph, footprint.within_step_bytes):
        with suppress(Unanswerable):  # the run lacks what an edit needs
            predicted = predict(graph, baseline, edits, trust)
            ways.append((tuple(edits), predicted.predicted_ns / predicted.samples, within))
    free = footprint.free_bytes
    points = [
        ParetoPoint(
            list(map(str, edits)),
            ms(time),
            base / time if time else None,
            within,
            None if free is None else within - footprint.within_step_bytes <= free,
            best=not any(_beats((other, more), (time, within)) for _, other, more in ways),
        )
        for edits, time, within in ways
    ]
    return sorted(points, key=lambda point: (point.within_step_bytes, point.ms_per_batch))


def _beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def _ways(graph: Graph, within: int) -> list[tuple[list[Edit], int]]:
    """Return edits with the bytes that a step allocates under them; `within` are those of a step today."""
    larger = {factor: Batch(factor, memory_gb=UNLIMITED_GB) for factor in FACTORS}
    ways: list[tuple[list[Edit], int]] = [([Accumulate(factor)], within) for factor in FACTORS]
    ways += [([batch], factor * within) for factor, batch in larger.items()]
    for pattern, names in sorted(blocks_of_run(graph.run).items()):
        left = max(within - freed_by_recomputing(graph.run, names), 0)
        again = Recompute(pattern)
        ways.append(([again], left))
        ways += [([again, batch], factor * left) for factor, batch in larger.items()]
    return ways


class PredictionDocument(DocumentPart, frozen=True):
    """The predicted mean step under all edits together.

    Attributes:
        edits: edits in the syntax of `--edit`, in order of application.
        predicted_ms: mean step under the edits.
        speedup: throughput in samples per second over that of the job as it is; null if no time is left of
            the step.
        proven: whether recordings before and after such changes have confirmed such predictions.
        block: proven, unproven or bound.
        effect: faster, slower, or unclear if the interval of the gain includes 0.
        low, high: interval of the predicted time, ms.
        how: how to change the job, and the assumptions.
        notes: findings of the edits in the run, one line each.
        samples: samples of a step, as a multiple of today's.
        speedup_low, speedup_high: interval of the speedup; null if possibly no time is left of the step.
        gain_ms: time saved for the samples of today's step; null if no time is left of the step.
        gain_low_ms, gain_high_ms: interval of `gain_ms`.
        samples_per_s: predicted elements of batches per second, all ranks; null where not counted.
        effort: effort of the change: flag, line (of code), code, money, or none if it cannot be made.
        training: changes of the training itself, one line each; their effect on convergence is not predicted.
        best: whether no other advice gains as much for less effort, or more for as much.
    """

    edits: list[str]
    predicted_ms: float
    speedup: float | None
    proven: bool
    block: str
    effect: str
    low: float
    high: float
    how: str
    notes: list[str]
    samples: float
    speedup_low: float | None
    speedup_high: float | None
    gain_ms: float | None
    gain_low_ms: float | None
    gain_high_ms: float | None
    samples_per_s: float | None
    effort: str
    training: list[str]
    best: bool


def undominated(predictions: Sequence[Prediction]) -> list[bool]:
    """Return [P] whether no other advice gains as much for less effort, or more for as much."""
    advice = [prediction for prediction in predictions if prediction.is_advice and prediction.speedup > 1]
    efforts = list(EFFORTS)

    def beats(one: Prediction, other: Prediction) -> bool:
        more = one.speedup - other.speedup
        less = efforts.index(other.effort) - efforts.index(one.effort)
        return more >= 0 and less >= 0 and (more > 0 or less > 0)

    best = {id(prediction) for prediction in advice if not any(beats(one, prediction) for one in advice)}
    return [id(prediction) in best for prediction in predictions]


def prediction_document(
    prediction: Prediction, best: bool = False, samples_per_s: float | None = None
) -> PredictionDocument:
    """Return the document of a prediction.

    Args:
        best: the prediction's value of `undominated`.
        samples_per_s: elements of batches per second today; None where unknown.
    """
    speedup = finite(prediction.speedup)
    return PredictionDocument(
        edits=[str(edit) for edit in prediction.edits],
        predicted_ms=ms(prediction.predicted_ns),
        speedup=speedup,
        proven=prediction.proven,
        block=prediction.block,
        effect=prediction.effect,
        low=ms(prediction.low_ns),
        high=ms(prediction.high_ns),
        how=prediction.how(),
        notes=list(prediction.notes),
        samples=prediction.samples,
        speedup_low=finite(prediction.speedup_at(prediction.gain_low_ns)),
        speedup_high=finite(prediction.speedup_at(prediction.gain_high_ns)),
        gain_ms=finite(ms(prediction.gain_ns)),
        gain_low_ms=finite(ms(prediction.gain_low_ns)),
        gain_high_ms=finite(ms(prediction.gain_high_ns)),
        samples_per_s=samples_per_s * speedup if samples_per_s and speedup else None,
        effort=prediction.effort,
        training=list(prediction.training),
        best=best,
    )


class TrustedDocument(Document, frozen=True, kw_only=True):
    """An answer that rests on the replay.

    Attributes:
        run: the run, as the user named it.
        answerable: whether predictions may start from this replay.
        trust: how far to trust predictions.
        reasons: what the trace cannot answer.
        assumed: assumptions behind the graph.
    """

    run: str
    answerable: bool
    trust: TrustDocument
    reasons: list[str]
    assumed: list[str]


class SensitivityDocument(TrustedDocument, frozen=True, kw_only=True):
    """The step time against the speed of each part of the machine.

    Attributes:
        sensitivity: one curve per part.
    """

    sensitivity: list[Curve]


class ParetoDocument(TrustedDocument, frozen=True, kw_only=True):
    """Time against memory, the least memory first.

    Attributes:
        pareto: ways to run the job.
    """

    pareto: list[ParetoPoint]


class WhatIfDocument(AccountedDocument, frozen=True, kw_only=True):
    """Predicted throughput and usual step under edits.

    Attributes:
        run: the run, as the user named it.
        baseline_ms: the usual step as the job runs: replayed, without the recorder's cost.
        measured_ms: the same steps as recorded.
        recording: the recorder's cost taken out of the baseline, the time of steps outside deep windows if it
            differs, and whether other jobs took cores, one line each.
        of_operations: whether both times are of whole operations, outside deep windows if such steps exist.
        other_steps_ms: typical step outside deep windows; null if there are no such steps.
        answerable: whether predictions may start from this replay.
        trust: how far to trust predictions.
        reasons: what the trace cannot answer.
        assumed: assumptions behind the graph.
        predictions: predictions: proven, then unproven, then bounds; within each, the fastest first.
        widened: intervals that the ledger of `dpro try` has widened, one line each.
        interactions: pairs of the best edits whose gains do not add up.
        untried: edits beyond the budget of the search.
        refused: edits that the run cannot answer.
        little: edits that gain next to nothing, or make the job slower.
        samples_per_s: elements of batches per second today, all ranks; null where not counted.
        end: how the job ended.
        selection: steps whose mean is measured and predicted; absent for all.
        pretended: step of the job whose ranks were pretended; null if they were not.
    """

    run: str
    baseline_ms: float
    measured_ms: float
    recording: list[str]
    of_operations: bool
    other_steps_ms: float | None
    answerable: bool
    trust: TrustDocument
    reasons: list[str]
    assumed: list[str]
    predictions: list[PredictionDocument]
    widened: list[str]
    interactions: list[Interaction]
    untried: list[str]
    refused: list[Refusal]
    little: list[SmallGain]
    samples_per_s: float | None
    end: JobEnd
    selection: SelectionDocument | UnsetType = UNSET
    pretended: PretendedStep | None = None


class WhatIf(NamedTuple):
    """A what-if document, and the predictions behind it."""

    document: WhatIfDocument
    predictions: list[Prediction]


def what_if(
    analysis: Analysis,
    edits: Sequence[Edit] = (),
    budget: int | None = None,
    *,
    progress: Progress = ignore,
    selection: Selection = ALL,
) -> WhatIf:
    """Predict edits together; without edits, search for changes that would help.

    Args:
        edits: edits, applied in this order.
        budget: largest number of predictions of a search; None for the default.
        progress: called with the predictions made, and their largest number.
        selection: steps whose mean is predicted.

    Raises:
        UsageError: no deep window covers the selected steps.
        Unanswerable: the run has no whole step.
    """
    whole = analysis
    analysis = _analysis_for(whole, edits)
    trust, baseline = trust_and_baseline(analysis, selection)
    if edits:
        result = _predicted(analysis, edits, selection)
        result = dataclasses.replace(result, refused=_with_own_reasons(result.refused, analysis))
    else:
        result = search_of_all(analysis, budget, progress, selection)
    predictions = result.predictions
    samples_per_s = inputs_per_s(analysis)
    document = WhatIfDocument(
        **_trusted(analysis),
        baseline_ms=ms(float(durations_of(baseline)["duration_ns"].mean() or 0)),  # type: ignore[arg-type]
        measured_ms=ms(measured_ns(trust, baseline)),
        recording=[] if analysis is not whole else recording_lines(analysis),
        of_operations=analysis is not whole,
        other_steps_ms=_step_outside_windows_ms(analysis),
        predictions=[
            prediction_document(prediction, best, samples_per_s)
            for prediction, best in zip(predictions, undominated(predictions))
        ],
        pretended=analysis.pretended,
        widened=[
            f"{' + '.join(map(str, prediction.edits))}: interval {prediction.widened}"
            for prediction in predictions
            if prediction.widened
        ],
        interactions=result.interactions,
        untried=result.untried,
        refused=result.refused,
        little=result.little,
        samples_per_s=samples_per_s,
        end=analysis.end,
        selection=selection_document(selection),
    )
    return WhatIf(document, predictions)


@cached
def search_once(analysis: Analysis) -> SearchResult:
    """Search for changes that would help the mean of all steps, within the default budget."""
    elsewhere = analysis.run.num_rows(SPANS) >= analysis.min_searched_elsewhere and analysis.condensed is None
    return search_of_all(analysis, elsewhere=elsewhere)


def search_of_all(
    analysis: Analysis,
    budget: int | None = None,
    progress: Progress = ignore,
    selection: Selection = ALL,
    elsewhere: bool = False,
) -> SearchResult:
    """Search all edits for those that would help; find none for a job that hung, which speed does not fix.

    Args:
        elsewhere: whether to search in another process, whose memory is freed when it ends.

    Raises:
        UsageError: no deep window covers the selected steps.
        Unanswerable: the run has no whole step.
        DproError: the other process was killed.
    """
    if analysis.end.hung:
        return SearchResult([], [], [], [])
    analysis = _analysis_for(analysis, ())
    trust, baseline = trust_and_baseline(analysis, selection)
    budget = BUDGET if budget is None else budget
    explorer = _explored_elsewhere if elsewhere else explored
    search = partial(explorer, analysis, budget, progress, trust, baseline)
    result = cached_search(analysis, selection, budget, search)
    return dataclasses.replace(
        result,
        predictions=ranked(calibrated(analysis, prediction) for prediction in result.predictions),
        refused=_with_own_reasons(result.refused, analysis),
    )


def _analysis_for(analysis: Analysis, edits: Sequence[Edit]) -> Analysis:
    """Return the analysis by whole operations if an edit needs it, or no spans were recorded; else itself."""
    view = analysis.operations
    if view is None or (analysis.run.num_rows(SPANS) and not any(edit.on_operations() for edit in edits)):
        return analysis
    return view


def _predicted(analysis: Analysis, edits: Sequence[Edit], selection: Selection) -> SearchResult:
    try:
        prediction = predict_edits(analysis, edits, selection)
    except Unanswerable as error:
        return SearchResult([], [Refusal(" + ".join(map(str, edits)), str(error))], [], [])
    return SearchResult([prediction], [], [], [])


def _with_own_reasons(refused: Sequence[Refusal], analysis: Analysis) -> list[Refusal]:
    """Replace refusals for lack of whole operations by the reason why the recorded ones do not replay."""
    if not refused:
        return []
    from dpro.replay.whatif.edits.balance import NOT_OPERATIONS

    wanting = [refusal.reason == NOT_OPERATIONS for refusal in refused]
    why = analysis.why_no_operations if any(wanting) else ""
    if not why:
        return list(refused)
    reason = f"forward and backward of micro-batches were recorded, but their replay does not fit: {why}"
    return [Refusal(refusal.edit, reason) if is_ else refusal for refusal, is_ in zip(refused, wanting)]


def explored(
    analysis: Analysis,
    budget: int,
    progress: Progress,
    trust: Trust,
    baseline: pl.DataFrame,
) -> SearchResult:
    """Search without the cache: edits of whole operations in their own graph, if the run has one.

    Args:
        progress: called with the predictions made, and their largest number.
    """
    view = analysis.operations
    if view is None or view is analysis:
        return _explored_in(analysis, budget, progress, trust, baseline)
    apart = [kind for kind in all_kinds() if kind.of_operations]
    others = [kind for kind in all_kinds() if not kind.of_operations]
    result = _explored_in(analysis, budget, progress, trust, baseline, others)
    graph, suspects = view.built.predictive, analysis.suspects
    beside = explore(graph, view.trust, budget, suspects=suspects, baseline=view.baseline, kinds=apart)
    scale = float(durations_of(baseline)["duration_ns"].to_numpy().mean()) / view.baseline_ns
    moved = [scaled(prediction, scale, view) for prediction in beside.predictions]
    return SearchResult(
        ranked([*result.predictions, *moved]),
        [*result.refused, *beside.refused],
        [*result.interactions, *beside.interactions],
        [*result.untried, *beside.untried],
        [*result.little, *beside.little],
    )


def _explored_in(
    analysis: Analysis,
    budget: int,
    progress: Progress,
    trust: Trust,
    baseline: pl.DataFrame,
    kinds: Collection[type[Edit]] | None = None,
) -> SearchResult:
    """Search one graph: the whole one, or condensed ranks if that does not fit into memory.

    Args:
        kinds: kinds of edits to consider; None for all.
    """
    run, condensed, suspects = analysis.run, analysis.condensed, analysis.suspects
    if condensed is None or not why_too_large(run):
        return explore(analysis.built.predictive, trust, budget, progress, suspects, baseline, kinds)
    with condensed_job(run, condensed) as job:
        return explore(job, trust, budget, progress, suspects, baseline, kinds)


def _explored_elsewhere(
    analysis: Analysis, budget: int, _progress: Progress, trust: Trust, baseline: pl.DataFrame
) -> SearchResult:
    """Search in another process, whose memory is freed when it ends.

    Raises:
        DproError: the process was killed.
    """
    from concurrent.futures.process import BrokenProcessPool

    try:
        with process_pool(1) as pool:
            search = pool.submit(_explored_run, analysis.run, budget, analysis.suspects, trust, baseline)
            return search.result()
    except BrokenProcessPool as error:
        why = "the process that searched for changes was killed, perhaps because memory ran out"
        raise DproError(f"{analysis.run.label}: {why}") from error


def _explored_run(
    run: Run, budget: int, suspects: frozenset[int], trust: Trust, baseline: pl.DataFrame
) -> SearchResult:
    analysis = Analysis(run)
    analysis.values["suspects"] = suspects
    return explored(analysis, budget, ignore, trust, baseline)


def scaled(prediction: Prediction, scale: float, view: Analysis) -> Prediction:
    """Scale a prediction by whole operations to the mean step of the other predictions' graph.

    Args:
        scale: mean step of that graph over the mean step of whole operations.
        view: analysis of the run by whole operations.
    """
    steps = view.trust.steps.height
    note = (
        f"predicted by the whole operations of {steps} steps, the mean of which takes "
        f"{format_duration(view.baseline_ns)}; their replay misses the steps by {view.trust.error_pct:.1f}%"
    )
    return dataclasses.replace(
        prediction,
        predicted_ns=prediction.predicted_ns * scale,
        low_ns=prediction.low_ns * scale,
        high_ns=prediction.high_ns * scale,
        gain_low_ns=prediction.gain_low_ns * scale,
        gain_high_ns=prediction.gain_high_ns * scale,
        notes=(*prediction.notes, note),
    )


def _step_outside_windows_ms(analysis: Analysis) -> float | None:
    """Return the typical step outside deep windows, in ms; None if there are no such steps."""
    series = series_outside(analysis.steps)
    return None if series is None else ms(series.typical_ns)


def _mean_outside_in_words(analysis: Analysis, median_ms: float) -> str:
    """Return the mean of steps outside deep windows, after a comma; empty if it is close to their median."""
    series = series_outside(analysis.steps)
    mean_ms = median_ms if series is None else ms(series.mean_ns)
    return f", the mean {mean_ms:.2f} ms" if abs(mean_ms - median_ms) > MIN_DIFFERENCE * median_ms else ""


def recording_lines(analysis: Analysis) -> list[str]:
    """Return what predictions start from: recording's cost that was taken out, other steps, other jobs."""
    taken_out, outside_ms = taken_out_in_words(analysis.trust), _step_outside_windows_ms(analysis)
    lines = [taken_out] if taken_out else []
    usual_ms = ms(analysis.baseline_ns)
    if (
        outside_ms is not None
        and abs(usual_ms - outside_ms) > MIN_DIFFERENCE * outside_ms
        and not analysis.run.manifest.is_pretended
    ):
        mean = _mean_outside_in_words(analysis, outside_ms)
        lines.append(f"the median step outside deep windows takes {outside_ms:.2f} ms{mean}")
    if analysis.shared_hosts:
        lines.append(OTHER_LOAD)
    return lines


def sensitivity_of(analysis: Analysis) -> SensitivityDocument:
    """Return the step time against the speed of each part of the machine.

    Raises:
        Unanswerable: the run has no whole step.
    """
    curves = sensitivity(analysis.built.predictive)
    return SensitivityDocument(**_trusted(analysis), sensitivity=curves)


def pareto_of(analysis: Analysis) -> ParetoDocument:
    """Return time against memory for several ways to run the job, the least memory first.

    Raises:
        Unanswerable: the run has no allocations, or no whole step.
    """
    points = pareto(analysis.built.predictive, analysis.trust)
    return ParetoDocument(**_trusted(analysis), pareto=points)


def _trusted(analysis: Analysis) -> dict[str, Any]:
    """Return the fields of a `TrustedDocument`."""
    trust = analysis.trust
    return {
        "run": analysis.run.label,
        "answerable": trust.answerable,
        "trust": trust_document(trust),
        "reasons": list(trust.reasons),
        "assumed": list(trust.assumed),
    }


# Results of earlier searches, cached on disk, so that repeating one on an unchanged run is free.

KEPT = 64  # last-used searches; each takes some ten kilobytes


def cached_search(
    analysis: Analysis, selection: Selection, budget: int, search: Callable[[], SearchResult]
) -> SearchResult:
    """Return the cached result of a search, or run `search` and cache its result.

    Raises:
        Unanswerable: the search raised it.
    """
    graph, _ = _graph_to_search(analysis)
    if graph.num_nodes < graphs.WORTH_SAVING:
        return search()
    try:
        folder = cache_folder("searches")
    except DproError:
        return search()
    file = folder / f"{_search_key(analysis, selection, budget)}.json"
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError, DproError):
        result = _result_from_json(json.loads(file.read_text(encoding="utf-8")))
        file.touch()  # mark as used
        return result
    result = search()
    with suppress(OSError, TypeError, DproError):  # such as a full disk: the answer exists all the same
        text = json.dumps(_result_to_json(result))
        if _result_from_json(json.loads(text)) == result:
            content = text.encode()
            with written_whole(file.parent.resolve(), file.name) as stream:
                stream.write(content)
            keep_latest(file.parent, "*.json", KEPT)
    return result


def _graph_to_search(analysis: Analysis) -> tuple[Graph, bool]:
    """Return the graph to search, and whether it is the condensed one, since the whole is too large."""
    by_rank = analysis.condensed is not None and bool(why_too_large(analysis.run))
    return (analysis.outline if by_rank else analysis.built).predictive, by_rank


def _search_key(analysis: Analysis, selection: Selection, budget: int) -> str:
    """Return a hash of everything that a search depends on."""
    digest = hashlib.blake2b(fingerprint(analysis.run).encode(), digest_size=16)
    digest.update(COEFFICIENTS.read_bytes())
    for name in (TOPOLOGY, PATHS):  # files that the user may add to the run later
        kept = analysis.run.path / name
        digest.update(kept.read_bytes() if kept.is_file() else b"\0")
    graph, by_rank = _graph_to_search(analysis)
    digest.update(repr((selection, budget, sorted(analysis.suspects), by_rank)).encode())
    for table in (graph.network, graph.products):
        digest.update(b"\0" if table is None else table.write_csv().encode())
    return digest.hexdigest()


def _result_to_json(result: SearchResult) -> dict[str, Any]:
    """Return a result as JSON values, with edits in the syntax of `--edit`."""
    predictions = [
        {name: getattr(prediction, name) for name in Prediction.__dataclass_fields__}
        | {"edits": list(map(str, prediction.edits))}
        for prediction in result.predictions
    ]
    return {
        "predictions": predictions,
        "refused": plain(result.refused),
        "interactions": plain(result.interactions),
        "untried": result.untried,
        "little": plain(result.little),
    }


def _result_from_json(kept: Mapping[str, Any]) -> SearchResult:
    """Return the result in a document of `_result_to_json`."""
    predictions = [
        prediction
        | {"edits": tuple(map(parse_edit, prediction["edits"])), "notes": tuple(prediction["notes"])}
        for prediction in kept["predictions"]
    ]
    return SearchResult(
        [Prediction(**prediction) for prediction in predictions],
        msgspec.convert(kept["refused"], list[Refusal]),
        msgspec.convert(kept["interactions"], list[Interaction]),
        kept["untried"],
        msgspec.convert(kept["little"], list[SmallGain]),
    )
