"""The command `dpro serving RUN`: what a server's latency and throughput consist of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.options import NumberRange
from dpro.cli.output import console, json_option, print_json
from dpro.errors import UsageError
from dpro.units import format_ms

if TYPE_CHECKING:
    from dpro.extensions.serving.document import ServingDocument
    from dpro.extensions.serving.outlook import ServingPrediction
    from dpro.store import Run

MAX_PREDICTIONS = 10  # that are printed
POSITIVE = NumberRange(0, 1e9, min_open=True)
COUNT = click.IntRange(0, 1 << 40)


@click.command()
@click.argument("run", type=click.Path(), metavar="RUN")
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="CHANGE",
    help="Change to predict; several are applied together.",
)
@click.option("--ttft-ms", type=POSITIVE, help="Search: 99% of first tokens within this time.")
@click.option(
    "--tpot-ms", type=POSITIVE, help="Search: 99% of requests with a time per output token within this."
)
@click.option(
    "--max-requests",
    type=COUNT,
    default=0,
    help="Maximum requests per batch, if missing from the engine's log.",
)
@click.option(
    "--token-budget", type=COUNT, default=0, help="Maximum tokens per iteration, if missing from the log."
)
@click.option("--kv-tokens", type=COUNT, default=0, help="Tokens in the KV cache, if missing from the log.")
@click.option("--model", default="", help="The model's config.json, for another device or parallelism.")
@click.option("--device", default="", help="GPU of the recording, if the run does not name it.")
@click.option(
    "--tp", type=click.IntRange(1, 4096), default=1, help="Tensor-parallel degree of the recorded server."
)
@json_option
def serving(run: str, as_json: bool, **asked: Any) -> None:
    """Break down an inference server's latency and throughput, and predict what would help.

    \b
    dpro record -o RUN -- python serve.py                    transformers
    dpro import profile/ --requests log.jsonl -o RUN         vLLM, SGLang
    dpro serving RUN

    Prints percentiles of time to first token (TTFT), time per output token (TPOT), queueing time and total
    latency; why requests waited; where engine iterations spend their time; and what is slow, with its cost in
    ms per token and tokens per second (docs/serving.md).

    \b
    dpro serving RUN --edit chunked-prefill:tokens=512
    dpro serving RUN --ttft-ms 500 --tpot-ms 50     settings for most requests

    A prediction serves the recorded requests again, with an engine model fitted to the run. CHANGE is one of
    max-batch:requests=64, chunked-prefill:tokens=512, arrivals:rate=2, prompts:length=2, outputs:length=2,
    prefix:share=0.5, speculate:tokens=3,acceptance=0.7, pools:prefill=1,decode=1, nano-batches,
    faster:compute=2,memory=1.4, quantize:weights=4.25,kv=8, kv-cache:tokens=80000, replicas:count=2,
    clients:count=64, requests:file=LOG (arrivals and lengths of another log), or, with --model,
    tensor-parallel:degree=4 and device:name=H200.
    """
    import msgspec

    from dpro.cli.analysis import open_quietly
    from dpro.extensions.serving.document import serving_document

    opened = open_quietly(run)
    document = serving_document(opened)
    if asked["edits"] or asked["ttft_ms"] or asked["tpot_ms"]:
        document = msgspec.structs.replace(document, predictions=_predictions(opened, asked))
    if as_json:
        print_json(document)
    else:
        print_serving(document)


def _predictions(run: Run, asked: Mapping[str, Any]) -> list[ServingPrediction]:
    """Predict changes, or search for the best ones.

    Raises:
        UsageError: both are requested, or a change is invalid.
        Unanswerable: the run lacks what a prediction needs.
        InputError: a log that a change names cannot be read.
    """
    from dpro.extensions.serving.changes import logs_of
    from dpro.extensions.serving.outlook import Limits, predictions, search
    from dpro.extensions.serving.predict import Goal
    from dpro.extensions.serving.requests import read_requests

    logs = {file: read_requests([Path(file)]).requests for file in logs_of(asked["edits"])}
    given = {limit.name: asked[limit.name] for limit in fields(Limits) if limit.name in asked}
    limits = Limits(**given, logs=logs)
    if not (asked["ttft_ms"] or asked["tpot_ms"]):
        return predictions(run, asked["edits"], limits)
    if asked["edits"]:
        raise UsageError("give changes (--edit), or a goal to search for (--ttft-ms, --tpot-ms), not both")
    return search(run, Goal(asked["ttft_ms"] or inf, asked["tpot_ms"] or inf), limits)


def print_serving_of(run: Run) -> None:
    """Print the answer about a server, if the run is of one."""
    from dpro.extensions.serving.document import has_serving, serving_document

    if has_serving(run):
        console().print()
        print_serving(serving_document(run))


def print_serving(document: ServingDocument) -> None:
    """Print the answer for people."""
    from dpro.extensions.serving.findings import costs_in_words

    out = console()
    for sentence in document.sentences:
        out.print(sentence, markup=False)
    _print_latency(document)
    _print_iterations(document)
    for finding in document.findings:
        out.print(f"\n{finding.class_}: {costs_in_words(finding)} at most", markup=False)
        for line in [*finding.evidence, f"help: {finding.help}"]:
            out.print(f"  {line}", markup=False)
    for line in document.unknown:
        out.print(f"not known: {line}", markup=False)
    _print_predictions(document.predictions)


def _print_latency(document: ServingDocument) -> None:
    from rich.table import Table

    from dpro.extensions.serving.latency import number

    if not document.latency:
        return
    table = Table(
        "measure, ms", "requests", "mean", "p50", "p90", "p99", title=_rates(document), title_justify="left"
    )
    for name, figures in document.latency.items():
        values = (number(value) for value in (figures.mean, figures.p50, figures.p90, figures.p99))
        table.add_row(name.removesuffix("_ms"), str(figures.requests), *values)
    console().print(table)
    if document.waited:
        parts = ", ".join(
            f"{part.removesuffix('_ms')} {format_ms(ms)}" for part, ms in document.waited.items() if ms
        )
        console().print(f"waited for, mean: {parts}", markup=False)
    for slow in document.slowest[:3]:
        most = max(slow.waited, key=lambda part: slow.waited[part]) if slow.waited else ""
        why = f", {format_ms(slow.waited[most])} of it {most.removesuffix('_ms')}" if most else ""
        by = f", stalled longest by request {slow.stalled_by}" if slow.stalled_by >= 0 else ""
        name = f" ({slow.name})" if slow.name not in ("", str(slow.request)) else ""
        console().print(
            f"slow: request {slow.request}{name}: {format_ms(slow.latency_ms)}{why}{by}", markup=False
        )


def _rates(document: ServingDocument) -> str:
    from dpro.extensions.serving.latency import number

    rates = (
        (document.arrivals_per_s, "arrivals/s"),
        (document.requests_per_s, "requests/s"),
        (document.output_tokens_per_s, "output tokens/s"),
        (document.prompt_tokens_per_s, "prompt tokens/s"),
    )
    return ", ".join(f"{number(rate)} {unit}" for rate, unit in rates if rate is not None)


def _print_iterations(document: ServingDocument) -> None:
    from rich.table import Table

    from dpro.extensions.serving.latency import counted, number

    if not document.iterations:
        return
    table = Table("iterations", "count", "mean ms", "p99 ms", "share", "prompt tokens", "requests")
    for kind in document.iterations:
        said = ("" if value is None else number(value) for value in (kind.prefill_tokens, kind.requests))
        table.add_row(
            kind.kind,
            f"{kind.count:,}",
            number(kind.mean_ms),
            number(kind.p99_ms),
            f"{kind.share:.0%}",
            *said,
        )
    console().print(table)
    if document.parts:
        parts = ", ".join(f"{part} {format_ms(ms)}" for part, ms in document.parts.items() if ms)
        seen = counted(document.windows, "iteration")
        console().print(f"one iteration, mean of {seen} of all ranks in deep windows: {parts}", markup=False)


def _print_predictions(predictions: list[ServingPrediction]) -> None:
    from dpro.extensions.serving.latency import number

    out = console()
    if any(prediction.requests_per_s is not None for prediction in predictions):
        out.print("\nThe most arrivals of one engine that keep the goal (0: none that was tried):")
    for prediction in predictions[:MAX_PREDICTIONS]:
        proven = "" if prediction.proven else "  (unproven)"
        name = " and ".join(prediction.edits) or "as it is"
        if prediction.requests_per_s is not None:
            out.print(f"{number(prediction.requests_per_s):>8} arrivals/s  {name}{proven}", markup=False)
            continue
        out.print(f"\n{name}{proven}", markup=False)
        for figure in prediction.figures:
            was = "" if figure.measured is None else f"{number(figure.measured)} → "
            ends = f"{number(figure.low)} to {number(figure.high)}"
            said = ends if figure.predicted is None else f"{number(figure.predicted)}  ({ends})"
            out.print(f"  {figure.name:<16}{was}{said}", markup=False)
        for sentence in prediction.load.sentences if prediction.load else ():
            out.print(f"  {sentence}", markup=False)
