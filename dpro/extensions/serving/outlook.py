"""Predicts how a changed server would serve the recorded requests, as a part of the answer of `dpro serving`.

Takes a run with requests and, where recorded, iterations; and changes, or a goal. Returns predictions with
intervals, or changes ranked by the request rate that they allow within the goal. Of several replicas, the one
with the most requests represents all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import polars as pl

from dpro.account import Gain
from dpro.analysis.graphs import graph_of
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.model import read_model
from dpro.extensions.serving.changes import (
    AS_THEY_ARE,
    CHANGES,
    NOTHING_GIVEN,
    ChangedIterations,
    GivenFacts,
    Server,
    changed_by_all,
    changed_iterations,
)
from dpro.extensions.serving.fit import NO_LIMIT, FittedCost, engine_of, fit_run, most_at_once
from dpro.extensions.serving.latency import number
from dpro.extensions.serving.predict import (
    FEW_DRAWS,
    INTERVAL,
    Goal,
    PredictedFigure,
    ensure_served_as_recorded,
    likely_servers,
    most_requests,
    predict,
    served_requests,
)
from dpro.extensions.serving.sized import ServedModel
from dpro.replay.cost.kernels.roofline import GPUS, common_model
from dpro.replay.whatif.grammar import split_edit
from dpro.replay.whatif.registry import EDITS, parse_edit
from dpro.schema import ITERATIONS, REQUESTS
from dpro.store import Run
from dpro.units import NS_PER_S
from dpro.words import suggest


@dataclass(frozen=True)
class Limits:
    """Limits of the engine that a user gives; 0 or empty for those that the recording must show.

    Attributes:
        max_requests: in a batch.
        token_budget: of an iteration.
        kv_tokens: capacity of the KV cache.
        model: path of the model's `config.json`; empty where it is not given.
        device: its GPU; empty where the recording must show it.
        tp: GPUs over which a layer is cut.
        logs: other requests that changes name, by the name of their file.
    """

    max_requests: int = 0
    token_budget: int = 0
    kv_tokens: int = 0
    model: str = ""
    device: str = ""
    tp: int = 1
    logs: Mapping[str, pl.DataFrame] = field(default_factory=dict)


class ServingPrediction(DocumentPart, frozen=True):
    """The predicted effect of changes.

    Attributes:
        edits: the changes, made together.
        figures: of the changed server; empty in a search.
        requests_per_s: maximum arrivals per second of one engine within the goal; 0 where no tried rate is,
            null without a goal.
        throughput: `requests_per_s` relative to the unchanged engine; null where one of them is unknown.
        proven: whether pairs of runs have confirmed predictions of such changes.
        load: offered load and capacity; null in a search, and where clients wait for answers.
    """

    edits: list[str]
    figures: list[PredictedFigure]
    requests_per_s: float | None
    throughput: Gain | None
    proven: bool
    load: OfferedLoad | None = None


# Changes confirmed by pairs of runs of a real server (docs/accuracy.md).
PROVEN = ("max-batch", "chunked-prefill", "arrivals", "prompts", "pools")


def predictions(run: Run, edits: Sequence[str], limits: Limits) -> list[ServingPrediction]:
    """Predict changes that are made together.

    Args:
        edits: such as `max-batch:requests=64`; or of the inside of iterations, such as `cuda-graph`.

    Raises:
        UsageError: there is no such change.
        Unanswerable: the run lacks what a prediction needs.
    """
    requests, fitted = _server(run, limits)
    inside = [edit for edit in edits if split_edit(edit)[0] in EDITS.keys() - CHANGES.keys()]
    given = GivenFacts(_served(run, limits), limits.logs, _inside(run, inside) if inside else AS_THEY_ARE)
    others = [edit for edit in edits if edit not in inside]
    figures = predict(requests, fitted, others, given)
    load = load_of(requests, fitted, others, given)
    return [ServingPrediction(list(edits), figures, None, None, _proven(edits), load)]


def search(run: Run, goal: Goal, limits: Limits) -> list[ServingPrediction]:
    """Rank changes, and the unchanged server, by the requests per second that they allow, the most first.

    Raises:
        Unanswerable: the run lacks what a prediction needs.
    """
    requests, fitted = _server(run, limits)
    ensure_served_as_recorded(requests, fitted)
    rates = most_requests(requests, fitted, goal)
    as_it_is = next((sustained.requests_per_s for sustained in rates if not sustained.changes), 0.0)
    return [
        ServingPrediction(
            list(sustained.changes),
            [],
            sustained.requests_per_s,
            Gain(None, sustained.requests_per_s / as_it_is, None) if as_it_is and sustained.changes else None,
            _proven(sustained.changes),
        )
        for sustained in rates
    ]


def _proven(edits: Sequence[str]) -> bool:
    return all(edit.partition(":")[0] in PROVEN for edit in edits)


def _inside(run: Run, edits: Sequence[str]) -> ChangedIterations:
    """Predict the effect of edits of jobs on iterations in deep windows.

    Raises:
        UsageError: an edit is invalid.
        Unanswerable: the run has no deep windows, or they lack what an edit needs.
    """
    parsed = [parse_edit(edit) for edit in edits]
    counted = (pl.col("prefill_tokens") >= 0) & (pl.col("decode_tokens") >= 0)
    iterations = run.table(ITERATIONS).filter(counted).filter(pl.col("rank") == pl.col("rank").min())
    return changed_iterations(graph_of(run)[0].graph, iterations, parsed)


def _served(run: Run, limits: Limits) -> ServedModel | None:
    """Return the model, and the GPUs that serve it; None where the model is not given.

    Raises:
        InputError: the configuration cannot be read.
        UsageError: there is no data sheet of the device.
        Unanswerable: the run did not record its device.
    """
    if not limits.model:
        return None
    gpu = limits.device or common_model(run.manifest.gpus)
    if not gpu:
        raise Unanswerable("the run does not say which GPU it was recorded on: give --device")
    if gpu not in GPUS:
        raise UsageError(f"--device: no data sheet of {gpu!r}{suggest(gpu, GPUS)}")
    return ServedModel(read_model(Path(limits.model)), gpu, limits.tp)


def _server(run: Run, limits: Limits) -> tuple[pl.DataFrame, FittedCost]:
    """Return requests with their times and lengths, of the busiest replica, and the server fitted to them.

    Raises:
        Unanswerable: there are none, or too few.
    """
    whole = (pl.col("prompt_tokens") > 0) & (pl.col("output_tokens") > 0) & (pl.col("end_ns") >= 0)
    requests = run.table(REQUESTS).filter(whole & (pl.col("arrival_ns") >= 0))
    if requests.is_empty():
        raise Unanswerable(
            "no request has its arrival, its end and its lengths: give a log (`dpro import --requests LOG`)"
        )
    replica = requests["replica"].mode().min()
    of_replica = requests.filter(pl.col("replica") == replica).sort("arrival_ns")
    iterations = run.table(ITERATIONS).filter(pl.col("replica") == replica)
    iterations = iterations.filter(pl.col("rank") == pl.col("rank").min()).sort("start_ns")
    engine = engine_of(of_replica, iterations)
    engine = replace(
        engine,
        max_requests=limits.max_requests or engine.max_requests,
        token_budget=limits.token_budget or engine.token_budget,
        kv_tokens=limits.kv_tokens or engine.kv_tokens,
        whole_prompts=engine.whole_prompts and not limits.token_budget,
    )
    return of_replica, fit_run(of_replica, iterations, engine)


# Whether a server keeps up: arrivals against its capacity. Below capacity, requests wait for a moment;
# near it, some percent of the cost decide between a moment and minutes; above it, the backlog grows while
# the load lasts, so the time to first token depends on the length of the log, and throughput on the server.


class OfferedLoad(DocumentPart, frozen=True):
    """The load of a changed server, and its capacity.

    Attributes:
        arrivals_per_s: requests.
        low_per_s, high_per_s: maximum requests like these that it can end per second: an interval aimed at
            90% coverage.
        most_recorded: maximum number of running requests in the recording, where the changes exceed it and
            the engine's own limit is unknown; else null.
    """

    arrivals_per_s: float
    low_per_s: float
    high_per_s: float
    most_recorded: int | None

    @property
    def sentences(self) -> list[str]:
        """Caveats for a reader; empty where the server surely keeps up."""
        arrive = f"{number(self.arrivals_per_s)} requests/s arrive, and it can serve "
        arrive += f"{number(self.low_per_s)} to {number(self.high_per_s)}: "
        said = []
        if self.high_per_s < self.arrivals_per_s:
            said.append(
                arrive + "each waits longer than the one before, so times to first token and latencies are "
                "those of a log of this length"
            )
        elif self.low_per_s < self.arrivals_per_s:
            said.append(arrive + "it is uncertain whether they queue up")
        if self.most_recorded is not None:
            said.append(
                f"more requests run at once than the {self.most_recorded:,} that were recorded; what the "
                "engine's limit is, is not known: give --max-requests"
            )
        return said


def load_of(
    requests: pl.DataFrame, fitted: FittedCost, changes: Sequence[str], given: GivenFacts = NOTHING_GIVEN
) -> OfferedLoad | None:
    """Return the load of a changed server; None where clients wait for answers, or all arrivals coincide.

    Args:
        requests: as recorded.

    Raises:
        UsageError: there is no such change.
        Unanswerable: a request never fits, or a change needs an unknown fact.
    """
    before = Server(requests, fitted.engine, fitted.cost, given=given)
    after = changed_by_all(before, changes)
    span_ns = int(np.ptp(after.requests["arrival_ns"].to_numpy()))
    if not span_ns or after.engine.clients:
        return None
    served = [served_per_s(server) for _, server, _ in likely_servers(before, fitted, changes, FEW_DRAWS)]
    low, high = np.quantile(served, INTERVAL)
    seen = most_at_once(requests)
    is_unknown = 0 < seen < most_at_once(served_requests(after, fitted.delay_s)) / after.engine.replicas
    return OfferedLoad(
        (after.requests.height - 1) * NS_PER_S / span_ns,
        float(low),
        float(high),
        seen if is_unknown and after.engine.max_requests >= NO_LIMIT else None,
    )


def served_per_s(server: Server) -> float:
    """Return the requests like these that a server can end per second, from the time that a second copy adds.

    All arrive at once; the time in which batches fill and drain cancels out.

    Raises:
        Unanswerable: a request never fits.
    """
    at_once = server.requests.with_columns(arrival_ns=pl.lit(0, pl.Int64))
    ends = [
        int(
            served_requests(replace(server, requests=pl.concat([at_once] * times)), 0.0)["end_ns"]
            .to_numpy()
            .max()
        )
        for times in (1, 2)
    ]
    if ends[1] <= ends[0]:
        raise Unanswerable("requests take no time that could be distinguished")
    return server.requests.height * NS_PER_S / (ends[1] - ends[0])
