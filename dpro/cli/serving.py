"""`dpro serving RUN`: what a server's latency and throughput consist of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dpro.cli.output import console, json_option, print_json

if TYPE_CHECKING:
    from dpro.serving.document import ServingDocument
    from dpro.store import Run


@click.command()
@click.argument("run", type=click.Path(), metavar="RUN")
@json_option
def serving(run: str, as_json: bool) -> None:
    """What a server's latency and throughput consist of, and what would help.

    \b
    dpro record -o RUN -- python serve.py                     continuous batching of transformers
    dpro import profile/ --requests log.jsonl -o RUN          a profile of vLLM, SGLang, and a log
    dpro serving RUN

    Percentiles of the time to the first token (TTFT), of the time per output token (TPOT), of the queue and
    of the whole latency; what requests waited for; what iterations of the engine spend their time on; and
    what is slow, with its cost in ms per token and in tokens per second (docs/serving.md).
    """
    from dpro.cli.runs import open_quietly
    from dpro.serving.document import serving_document

    document = serving_document(open_quietly(run))
    if as_json:
        print_json(document)
    else:
        print_serving(document)


def print_serving_of(run: Run) -> None:
    """Print what is known of a server, if a run is of one."""
    from dpro.serving.document import has_serving, serving_document

    if has_serving(run):
        console().print()
        print_serving(serving_document(run))


def print_serving(document: ServingDocument) -> None:
    """Print the answer for people."""
    out = console()
    for sentence in document.sentences:
        out.print(sentence, markup=False)
    _print_latency(document)
    _print_iterations(document)
    for finding in document.findings:
        costs = [
            f"{value:.3g} {unit}"
            for value, unit in (
                (finding.cost_tpot_ms, "ms of TPOT"),
                (finding.cost_ttft_ms, "ms of TTFT"),
                (finding.gain_tokens_per_s, "tokens/s"),
            )
            if value is not None
        ]
        out.print(f"\n{finding.class_}: {', '.join(costs)} at most", markup=False)
        for line in [*finding.evidence, f"help: {finding.help}"]:
            out.print(f"  {line}", markup=False)
    for line in document.unknown:
        out.print(f"not known: {line}", markup=False)


def _print_latency(document: ServingDocument) -> None:
    from rich.table import Table

    if not document.latency:
        return
    table = Table(
        "measure", "requests", "mean ms", "p50", "p90", "p99", title=_rates(document), title_justify="left"
    )
    for name, each in document.latency.items():
        values = (f"{value:.4g}" for value in (each.mean, each.p50, each.p90, each.p99))
        table.add_row(name.removesuffix("_ms"), str(each.requests), *values)
    console().print(table)
    if document.waited:
        parts = ", ".join(f"{part.removesuffix('_ms')} {ms:.3g}" for part, ms in document.waited.items())
        console().print(f"waited for, mean ms: {parts}", markup=False)
    for slow in document.slowest[:3]:
        most = max(slow.waited, key=lambda part: slow.waited[part]) if slow.waited else ""
        why = f", {slow.waited[most]:.3g} ms of it {most.removesuffix('_ms')}" if most else ""
        by = f", stalled longest by request {slow.stalled_by}" if slow.stalled_by >= 0 else ""
        console().print(
            f"slow: request {slow.request} {slow.name}: {slow.latency_ms:.4g} ms{why}{by}", markup=False
        )


def _rates(document: ServingDocument) -> str:
    rates = (
        (document.requests_per_s, "requests/s"),
        (document.output_tokens_per_s, "output tokens/s"),
        (document.prompt_tokens_per_s, "prompt tokens/s"),
    )
    return ", ".join(f"{rate:.4g} {unit}" for rate, unit in rates if rate is not None)


def _print_iterations(document: ServingDocument) -> None:
    from rich.table import Table

    if not document.iterations:
        return
    table = Table("iterations", "count", "mean ms", "p99 ms", "share", "prompt tokens", "requests")
    for each in document.iterations:
        said = ("" if value is None else f"{value:.3g}" for value in (each.prefill_tokens, each.requests))
        table.add_row(
            each.kind,
            str(each.count),
            f"{each.mean_ms:.4g}",
            f"{each.p99_ms:.4g}",
            f"{each.share:.0%}",
            *said,
        )
    console().print(table)
    if document.parts:
        parts = ", ".join(f"{part} {ms:.3g}" for part, ms in document.parts.items())
        console().print(
            f"one iteration, mean ms of {document.windows} in deep windows: {parts}", markup=False
        )
