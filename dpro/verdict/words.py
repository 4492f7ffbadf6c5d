"""Wording of a verdict in twelve lines of 80 characters, for every screen.

Takes an `Explanation`; returns lines of text without markup.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from dpro.account import StepEntry
from dpro.analysis.analysis import Analysis
from dpro.units import format_ms
from dpro.verdict.advice import MAX_GAIN, Advice
from dpro.verdict.ledger import RANK
from dpro.verdict.limits import (
    BUBBLE,
    CHECKPOINT,
    COLLECTION,
    COMMUNICATION,
    COMPILATION,
    COMPUTE,
    COPIES,
    HOST,
    IMBALANCE,
    INPUT,
    SYNCHRONISATION,
)
from dpro.verdict.verdict import NOT_DIAGNOSED, Explanation, Limit, explain, unlike_the_others
from dpro.words import as_fast_as_peers, ranks_in_words

WIDTH = 80
TRY, BOTH, THEN = "TRY", "BOTH", "THEN"
MARGIN = 7  # width of the labels
SHOWN = 0.005  # least share of the step that is shown

_LIMITS = {
    HOST: "the host: compute waits for it",
    COMPUTE: "compute: {share:.0%} of the step",
    COMMUNICATION: "communication: data moves between ranks while nothing computes",
    IMBALANCE: "uneven ranks: the others wait for the slowest",
    INPUT: "the input: the step waits until it is prepared",
    SYNCHRONISATION: "synchronisation: the host waits for the GPU, and then the GPU waits for the host",
    COPIES: "copies between host and device",
    BUBBLE: "the bubble of the busiest stage: it waits for other stages",
    COMPILATION: "compilation: code is compiled again during steps",
    CHECKPOINT: "checkpoints: steps wait while one is saved",
    COLLECTION: "garbage collection, in most steps",
}
_WITHOUT = {
    HOST: "With a free host",
    COMMUNICATION: "Without transfers",
    IMBALANCE: "With equal ranks",
    INPUT: "With free input",
    SYNCHRONISATION: "Without these waits",
    COPIES: "Without copies",
    BUBBLE: "Without these waits",
    COMPILATION: "Without compiling",
    CHECKPOINT: "Without saving",
    COLLECTION: "Without collecting",
}


def lines_of(verdict: Explanation) -> list[str]:
    """Return the verdict in lines, at most a screen of them."""
    parts = shares_of(verdict)
    half = -(-len(parts) // (2 if len(" | ".join(parts)) > WIDTH else 1))
    lines = _wrapped(verdict.job, "", "  ")
    lines += [" | ".join(part) for part in (parts[:half], parts[half:]) if part]
    for label, text in paragraphs_of(verdict):
        indent = 2 if label in (TRY, THEN, "") else 0
        lines += _wrapped(text, label.ljust(MARGIN), " " * (MARGIN + indent))
    return lines


_QUANTITY = re.compile(r"(?<=\d) (?=([num]?s|min|h|[kMGT]?B)\b)")  # the space between a number and its unit


def _wrapped(text: str, first: str, indent: str) -> list[str]:
    """Return a text in lines, which do not begin with a unit.

    Args:
        first: what the first line begins with; the others begin with `indent`.
    """
    lines = textwrap.wrap(
        _QUANTITY.sub("\N{NO-BREAK SPACE}", text), WIDTH, initial_indent=first, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def shares_of(verdict: Explanation) -> list[str]:
    """Return the parts of the step: `74% compute`, …"""
    return [f"{share:.0%} {part}" for part, share in verdict.shares.items() if share >= SHOWN]


def paragraphs_of(verdict: Explanation) -> list[tuple[str, str]]:
    """Return the paragraphs below the shares: a label, empty where it repeats, and a text of any length."""
    said = []
    if verdict.limit:
        text = limit_in_words(verdict.limit, verdict.step_ms or 0.0)
        said.append(("LIMIT", f"{text}{_hidden_in_waiting(verdict.limit, verdict.shares)}"))
    said += [("PHASE", f"{verdict.phase}.")] if verdict.phase else []
    said.append(("FAULT", verdict.fault))
    then = verdict.then
    for number, advice in enumerate(verdict.advice, 1):
        later = f" (once 1 is done {_gain(then)})" if then and then.kind == advice.kind else ""
        said.append((TRY if number == 1 else "", f"{number} {advice.do}{worth_in_words(advice)}{later}"))
    if both := verdict.together:
        edits = " ".join(f"--edit {edit}" for edit in both.edits)
        gain = times(both.gain_low, both.gain_high)
        said.append((BOTH, f"{both.places[0]} and {both.places[1]} together: {gain} ({edits})"))
    if then and then.kind not in {advice.kind for advice in verdict.advice}:
        said.append((THEN, f"{when_then(verdict)}, {then.do}{worth_in_words(then)}"))
    rest = {"NOT": verdict.tempting, "UNSURE": verdict.unsure}
    return [*said, *((label, "; ".join(texts)) for label, texts in rest.items() if texts)]


def when_then(verdict: Explanation) -> str:
    """Return when what comes after the limit is worth doing, and from which step its gain counts."""
    limit, when = verdict.limit, "once the limit is gone"
    if limit is None or verdict.step_ms is None or not limit.fits:
        return when
    return f"{when} (a step of {format_ms(verdict.step_ms / limit.gain)})"


def entry_in_words(entry: StepEntry) -> str:
    """Return the name of an entry of the account: that of its limit, with its ranks."""
    ranks = [ranks_in_words(entry.ranks)] if entry.ranks else []
    if ranks and entry.cause == RANK:
        return ranks[0]
    name = re.split("[:,]", _LIMITS.get(entry.cause, entry.cause.replace("-", " ")))[0]
    return ", ".join([name, *ranks])


def worth_in_words(advice: Advice) -> str:
    """Return the gain of advice, and its effort; empty if the gain is unknown."""
    gain = _gain(advice)
    return f": {gain}, {advice.effort}" if gain else ""


def _gain(advice: Advice) -> str:
    if advice.gain_low is None or advice.gain_high is None:
        return ""
    return times(advice.gain_low, advice.gain_high)


def limit_in_words(limit: Limit, step_ms: float) -> str:
    """Return what limits the step, and how long it would be without that."""
    said = _LIMITS[limit.kind].format(share=limit.share)
    if limit.kind == COMPUTE:
        return f"{said} (of that {limit.cause})." if limit.cause else f"{said}."
    because = f" ({limit.cause})" if limit.cause else ""
    if not limit.fits:
        return f"{said}{because}. The gain without that is not known, since the replay does not fit."
    without = f"With {as_fast_as_peers(limit.ranks)}" if limit.ranks else _WITHOUT[limit.kind]
    gain = times(limit.gain_low, limit.gain_high)
    shorter = f"{format_ms(step_ms)} -> {format_ms(step_ms / limit.gain)} ({gain})"
    return f"{said}{because}. {without} {shorter}."


def _hidden_in_waiting(limit: Limit, shares: Mapping[str, float]) -> str:
    """Return where the time of a host is that is a small part of each rank's step; empty otherwise."""
    host, waiting = (shares.get(part, 0.0) for part in ("host", "waiting"))
    if limit.kind != HOST or not host < limit.share / 2 or waiting < limit.share / 2:
        return ""
    return " Most of it is under waiting: ranks wait for each other's hosts."


def limit_of_run(analysis: Analysis) -> str:
    """Return the limit of a run unless that is compute, or why nothing shows it; empty if unknown."""
    if not analysis.run.manifest.ranks:
        return "Only requests of a server were recorded"
    explanation = explain(analysis)
    if explanation.fault == f"{NOT_DIAGNOSED}.":
        return f"Not diagnosed: {explanation.unsure[0]}"
    if explanation.limit is None or explanation.limit.kind == COMPUTE:
        return ""
    limits = limit_in_words(explanation.limit, explanation.step_ms or 0.0).rstrip(".")
    unlike = unlike_the_others(analysis)
    where = "the steps of its deep windows" if unlike else "the job"
    return (
        f"No slow rank or component found. What limits {where} is {limits}{f'; {unlike}' if unlike else ''}"
    )


def times(low: float, high: float) -> str:
    """Return a gain as an interval: `x1.2 to 1.5`, or `x1.2 or more` if its upper end says nothing."""
    if high > MAX_GAIN:
        return f"{_factor(min(low, MAX_GAIN))} or more"
    shown_low, shown_high = _factor(low), _factor(high)
    return shown_low if shown_low == shown_high else f"{shown_low} to {shown_high.removeprefix('x')}"


def _factor(gain: float) -> str:
    if gain > MAX_GAIN:
        return f"x{MAX_GAIN:g}+"
    return f"x{gain:.2f}" if gain < 2 else f"x{gain:.1f}"
