"""`dpro info`: what a run holds and what it lacks."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dpro.cli.output import console, json_option, print_json
from dpro.cli.run.end import end_keys, print_end
from dpro.cli.run.telemetry import in_words as telemetry_in_words
from dpro.cli.run.telemetry import summarize
from dpro.detect.findings_log import describe_logged, logged_findings
from dpro.units import us
from dpro.words import few

if TYPE_CHECKING:
    import polars as pl

    from dpro.store import Run

_UNKNOWN_KERNELS_NAMED = 5
_RANKS_NAMED = 8


@click.command()
@click.argument("run", metavar="RUN", type=click.Path())
@json_option
def info(run: str, as_json: bool) -> None:
    """What a run holds and what it lacks.

    \b
    dpro info RUN
    dpro info FOLDER_OF_TRACES --json

    Coverage is the share of what is there that dpro understands: collectives whose bytes and group are known,
    steps in deep windows, GPU time of kernels whose class no name tells.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.cli.runs import open_quietly

    opened = open_quietly(run)  # the warnings are part of what it prints
    analysis = Analysis(opened)
    document = describe(opened) | end_keys(analysis)
    if as_json:
        print_json(document)
    else:
        print_end(analysis.end)
        console().print("\n".join(in_words(document)))


def contents(run: Run) -> dict[str, Any]:
    """What a run holds, in the keys that `import` and `info` share."""
    manifest = run.manifest
    return {
        "run": run.label,
        "ranks": manifest.ranks,
        "world_size": manifest.world_size,
        "missing_ranks": manifest.missing_ranks,
        "rows": run.rows(),
        "warnings": manifest.warnings,
        "skipped": manifest.skipped,
        "coverage": {"unclassified": unclassified(run)},
    }


def describe(run: Run) -> dict[str, Any]:
    """What `info --json` prints."""
    from dpro.analysis.after_window import after_first_window
    from dpro.analysis.step_time import step_time_document
    from dpro.analysis.verdict import why_no_window
    from dpro.replay.steps.durations import steps_of
    from dpro.schema import COUNTERS, WORKERS

    steps = steps_of(run)
    held = contents(run)
    return held | {
        "cache": None if run.source is None else str(run.path),
        "steps": steps["step"].n_unique(),
        "step_time": step_time_document(steps),
        "hosts": run.manifest.hosts,
        "gpus": run.manifest.gpus,
        "clocks": _clocks(run),
        "telemetry": summarize(run.part_by_part(COUNTERS, list(COUNTERS.columns)), run.table(WORKERS)),
        "no_window": why_no_window(run),
        "ended": _ends(run),
        "exit_status": run.manifest.exit_status,
        "applied": run.manifest.applied,
        "attempts": _earlier_attempts(run),
        "while_it_ran": logged_findings(run.path),
        "windows": run.manifest.windows,
        "after_first_window": after_first_window(steps, bool(run.manifest.gpus)),
        "coverage": held["coverage"] | _coverage(run, steps, held["coverage"]["unclassified"]["share"]),
    }


def _clocks(run: Run) -> dict[str, Any]:
    """How many clocks the ranks had, and how often and how well those were compared."""
    import polars as pl

    from dpro.schema import CLOCK_SAMPLES, WORKERS

    known = run.table(WORKERS).filter(pl.col("clock") != "")["clock"].n_unique()
    between = run.table(CLOCK_SAMPLES).filter(pl.col("peer_rank") >= 0)
    return {
        "distinct": known or None,
        "compared": between.select("rank", "peer_rank").n_unique(),
        "samples": between.height,
        "round_trip_us": us(between["round_trip_ns"].median()) if between.height else None,  # type: ignore[arg-type]
    }


def _clocks_in_words(clocks: Mapping[str, Any]) -> list[str]:
    if not clocks["distinct"]:
        return []
    if clocks["distinct"] == 1:
        return ["clocks     one for all ranks"]
    if not clocks["samples"]:
        return [f"clocks     {clocks['distinct']}, never compared: known only by the ends of collectives"]
    bound = f"{clocks['round_trip_us'] / 2:.1f} us"
    return [f"clocks     {clocks['distinct']}, compared in {clocks['compared']} pairs to {bound} (median)"]


def _ends(run: Run) -> list[dict[str, Any]]:
    """How each rank ended, in the words of `dpro record`; none where nothing watched them."""
    from dpro.schema import WORKERS

    ends = run.table(WORKERS).select("rank", "host", "exit_code", "exit_signal").to_dicts()
    return [end | {"how": how_ended(end["exit_code"], end["exit_signal"])} for end in ends]


def how_ended(code: int, number: int) -> str:
    """For people: `exit code 3`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    if number < 0:
        return "nobody saw how"
    names = {each.value: each.name for each in signal.Signals}
    return f"killed by {names.get(number, f'signal {number}')}"


def _earlier_attempts(run: Run) -> list[str]:
    """Runs of the job before it was restarted."""
    return [str(path.parent) for path in sorted(run.path.glob("attempts/*/manifest.json"))]


def _coverage(run: Run, steps: pl.DataFrame, unclassified_share: float | None) -> dict[str, Any]:
    """Shares between 0 and 1, None where there is nothing to take a share of."""
    import polars as pl

    from dpro.schema import COLLECTIVES, SPANS

    collectives = run.table(COLLECTIVES)
    windows = {window for part in run.part_by_part(SPANS, ["window"]) for window in part["window"].unique()}
    return {
        "collective_bytes_known": collectives.select((pl.col("bytes_in") >= 0).mean()).item(),
        "collective_group_known": collectives.select((pl.col("group") != "").mean()).item(),
        "kernel_time_classified": None if unclassified_share is None else 1 - unclassified_share,
        "windows": len(windows),
        "steps_in_windows": steps.filter(pl.col("window") >= 0)["step"].n_unique(),
    }


def unclassified(run: Run) -> dict[str, Any]:
    """Kernels that the table of classes does not know: how many, their time, and which take most of it."""
    from dpro.classify import OTHER, classify, table_version

    counts, times = _kernels_by_name(run)
    unknown = [name for name in times if classify(name).kind == OTHER]
    time_ns, total_ns = sum(times[name] for name in unknown), sum(times.values())
    longest = sorted(unknown, key=lambda name: (-times[name], name))[:_UNKNOWN_KERNELS_NAMED]
    return {
        "kernels": sum(counts[name] for name in unknown),
        "time_ms": time_ns / 1e6,
        "share": time_ns / total_ns if total_ns else None,
        "names": longest,
        "classes": table_version(),
    }


def _kernels_by_name(run: Run) -> tuple[Counter[str], Counter[str]]:
    """How often each kernel ran, and for how many ns, with one part in memory at a time."""
    import polars as pl

    from dpro.schema import SPANS

    counts, times = Counter[str](), Counter[str]()
    for part in run.part_by_part(SPANS, ["kind", "name", "duration_ns"]):
        kernels = part.filter((pl.col("kind") == "kernel") & (pl.col("duration_ns") >= 0))
        for name, count, time_ns in (
            kernels.group_by("name").agg(pl.len(), pl.col("duration_ns").sum()).iter_rows()
        ):
            counts[name] += count
            times[name] += time_ns
    return counts, times


def in_words(document: Mapping[str, Any]) -> list[str]:
    """The same for people, one fact a line; what is missing comes last."""
    coverage = document["coverage"]
    from dpro.analysis.after_window import in_words as in_words_of_change
    from dpro.analysis.step_time import in_words as in_words_of_time
    from dpro.trial.places import in_words as applied_in_words

    lines = [
        f"run        {document['run']}",
        *([f"cache      {document['cache']}"] if document["cache"] else []),
        f"ranks      {ranks_in_words(document)}",
        f"hosts      {', '.join(document['hosts']) or 'not recorded'}",
        f"GPUs       {', '.join(document['gpus']) or 'none recorded'}",
        *_clocks_in_words(document["clocks"]),
        *(f"telemetry  {line}" for line in telemetry_in_words(document["telemetry"])),
        f"steps      {document['steps']}, of which {coverage['steps_in_windows']} lie in deep windows",
        *([f"step time  {in_words_of_time(document['step_time'])}"] if document["step_time"] else []),
        *([f"windows    none: {document['no_window']}"] if document["no_window"] else []),
        *_ended_in_words(document),
        *(f"watched    {line}" for line in describe_logged(document["while_it_ran"])),
        *(f"changed    {line}" for line in applied_in_words(document["applied"])),
        f"rows       {rows_in_words(document)}",
        f"kernels    {unclassified_in_words(coverage['unclassified'])}",
    ]
    if document["windows"]:
        lines.append(f"windows    {_windows_in_words(document['windows'])}")
    if document["after_first_window"]:
        lines.append(f"windows    {in_words_of_change(document['after_first_window'])}")
    shares = {
        "collectives with bytes known": coverage["collective_bytes_known"],
        "collectives with group known": coverage["collective_group_known"],
    }
    lines += [f"coverage   {share:.1%} {what}" for what, share in shares.items() if share is not None]
    lines += [f"skipped    {count} {reason}" for reason, count in document["skipped"].items()]
    return lines + [f"warning    {warning}" for warning in document["warnings"]]


def ranks_in_words(document: Mapping[str, Any]) -> str:
    """How many ranks there are and which are missing: `6 of 8, missing 3, 5`."""
    missing = document["missing_ranks"]
    named = few(missing, _RANKS_NAMED)
    return f"{len(document['ranks'])} of {document['world_size']}" + (f", missing {named}" if missing else "")


def _ended_in_words(document: Mapping[str, Any]) -> list[str]:
    """How the job and its ranks ended, those that ended alike together, and where earlier attempts are."""
    alike: dict[str, list[int]] = {}
    for end in document["ended"]:
        alike.setdefault(end["how"], []).append(end["rank"])
    ends = [f"{_ranks_of(ranks)}: {how}" for how, ranks in sorted(alike.items(), key=lambda item: item[1])]
    status = document["exit_status"]
    if ends and status is not None:
        ends.append(f"the job: {how_ended(status if status >= 0 else -1, -status if status < 0 else -1)}")
    return ([f"ended      {'; '.join(ends)}"] if ends else []) + [
        f"attempt    before this one: {path}" for path in document["attempts"]
    ]


def _ranks_of(ranks: list[int]) -> str:
    named = few(ranks, _RANKS_NAMED)
    return f"rank {named}" if len(ranks) == 1 else f"{len(ranks)} ranks ({named})"


def _windows_in_words(windows: Mapping[str, float]) -> str:
    """What deep windows cost: `4 deep windows of 62 ms each cost 0.84% of the time`."""
    return (
        f"{windows['count']:.0f} deep windows of {windows['cost_ms']:.3g} ms each "
        f"cost {windows['share']:.2%} of the time"
    )


def rows_in_words(document: Mapping[str, Any]) -> str:
    """Row counts of the tables that have any: `6800 spans, 32 collectives`."""
    return ", ".join(f"{count} {name}" for name, count in document["rows"].items() if count) or "none"


def unclassified_in_words(unknown: Mapping[str, Any]) -> str:
    """How much GPU time no class explains: `12 kernels unclassified, 3.1% of GPU time: my_kernel`."""
    if unknown["share"] is None:
        return "no kernels"
    names = f": {', '.join(name[:60] for name in unknown['names'])}" if unknown["names"] else ""
    return f"{unknown['kernels']} kernels unclassified, {unknown['share']:.1%} of GPU time{names}"
