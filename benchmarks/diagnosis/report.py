"""Tables of the diagnosis benchmark's rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
STRAGGLERS = ("compute", "host")


def wilson(right: int, total: int) -> str:
    """Return `right/total (low-high%)` with the 95% interval of Wilson (1927)."""
    if not total:
        return "-"
    z, p = 1.96, right / total
    middle, half = p + z * z / (2 * total), z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    low, high = (abs(middle + sign * half) / (1 + z * z / total) for sign in (-1, 1))  # 0 may come out as -0
    return f"{right}/{total} ({100 * low:.1f}-{100 * high:.1f}%)"


def count(rows: Iterable[Row], *verdicts: str) -> int:
    """Count the rows with one of these verdicts."""
    return sum(row["verdict"] in verdicts for row in rows)


def table(head: list[str], body: Iterable[list[Any]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def by_class(rows: list[Row]) -> str:
    """Return the table of right, silent and wrong verdicts by class and recorded data."""
    body = []
    for seen in ("windows", "calls"):
        for fault in dict.fromkeys(row["fault"] for row in rows):
            mine = [row for row in rows if (row["fault"], row["seen"]) == (fault, seen)]
            can = [row for row in mine if row["shows"]]
            cannot = [row for row in mine if not row["shows"]]
            hidden = [f"{count(cannot, verdict)} {verdict}" for verdict in ("silent", "right", "wrong")]
            body.append([
                fault or "healthy", seen, wilson(count(can, "right"), len(can)), count(can, "component"),
                count(can, "silent"), count(can, "wrong"), ", ".join(hidden) if cannot else "-",
            ])  # fmt: skip
    head = [
        "class",
        "recorded",
        "right part and class",
        "right part",
        "silent",
        "wrong",
        "does not show there",
    ]
    return table(head, body)


def by(rows: list[Row], name: str, key: Callable[[Row], Any]) -> str:
    """Return the table of stragglers that were named, and wrong verdicts, by one axis."""
    body = []
    for value in sorted({key(row) for row in rows}, key=str):
        mine = [row for row in rows if key(row) == value]
        body.append([value, wilson(count(mine, "right", "component"), len(mine)), count(mine, "wrong")])
    return table([name, "named", "wrong"], body)


def precision_and_recall(rows: list[Row], min_slowdown: float, min_share: float) -> str:
    """Return precision and recall of stragglers, and false alarms without slow ranks; dpro's and the rules'.

    Args:
        rows: all cases.
        min_slowdown: slowdown factor from which stragglers count.
        min_share: share of the step from which their true cost counts.
    """
    body = []
    straggling = [
        row for row in rows
        if row["fault"] in STRAGGLERS and row["shows"]
        and row["severity"] >= min_slowdown and share(row) >= min_share
    ]  # fmt: skip
    others = [row for row in rows if row["fault"] in ("", "imbalance", "regression", "input")]
    for name in ("dpro", "relative", "twice", "hta"):
        known = [row for row in straggling if name in ("dpro", *row["rules"])]
        unblamed = [row for row in others if name in ("dpro", *row["rules"])]
        named = [(row, named_ranks(row, name)) for row in known]
        right = sum(row["victim"] in ranks for row, ranks in named)
        alarms = sum(len(ranks) for _, ranks in named)
        elsewhere = sum(bool(named_ranks(row, name)) for row in unblamed)
        body.append(
            [name, wilson(right, alarms), wilson(right, len(named)), wilson(elsewhere, len(unblamed))]
        )
    what = f"x{min_slowdown} or more, costing {100 * min_share:.0f}% of the step or more"
    return table([what, "precision", "recall", "ranks blamed where none is slow"], body)


def share(row: Row) -> float:
    """Return the true cost of a fault, as a share of the step."""
    return (row["true_cost_ms"] or 0.0) / row["step_ms"]


def named_ranks(row: Row, name: str) -> set[int]:
    """Return the ranks that dpro or a rule calls slow."""
    if name != "dpro":
        ranks = row["rules"][name]
        return set(ranks) if isinstance(ranks, list) else set()  # a rule that raised has a message instead
    of_ranks = [each for each in row["findings"] if each["component"]["kind"] in ("rank", "ranks")]
    return {
        rank for each in of_ranks if each["class"] in ("slow.compute", "slow.host") for rank in each["ranks"]
    }


def abstentions(rows: list[Row]) -> str:
    """Return how often a fault had no finding, where the recording shows it and where it does not."""
    faulty = [row for row in rows if row["fault"]]
    shown = [row for row in faulty if row["shows"]]
    others = [row for row in faulty if not row["shows"]]
    return (
        f"Silent: {wilson(count(shown, 'silent'), len(shown))} of the faults that show, "
        f"{wilson(count(others, 'silent'), len(others))} of those that do not\n"
    )


def macro_f1(rows: list[Row]) -> float:
    """Return the mean over classes of the F1 of the named class, over all cases that the recording shows."""
    pairs = [(row["fault"] or "healthy", said(row)) for row in rows if row["shows"]]
    scores = []
    for name in {truth for truth, _ in pairs}:
        right = sum(truth == name == named for truth, named in pairs)
        total = sum(truth == name for truth, _ in pairs) + sum(named == name for _, named in pairs)
        scores.append(2 * right / total)
    return sum(scores) / len(scores)


def said(row: Row) -> str:
    """Return the class that a case's findings name, in the words of the faults."""
    if row["verdict"] in ("right", "silent"):
        return (row["fault"] or "healthy") if row["verdict"] == "right" else "healthy"
    first = row["findings"][0]
    kind = "job" if first["component"]["kind"] == "job" else ""
    names = {
        "slow.compute": "compute",
        "slow.host": "input" if kind else "host",
        "slow.regression": "regression",
        "slow.link": "network",
        "slow.nic": "network",
        "slow.fabric": "network",
    }
    return names.get(first["class"], "imbalance")


def costs(rows: list[Row]) -> str:
    """Return the quantiles of stated costs over true costs."""
    ratios = [
        each["cost_ms_per_step"] / row["true_cost_ms"]
        for row in rows
        if row["verdict"] == "right" and row["severity"] >= 1.2 and share(row) >= 0.03
        for each in row["findings"][:1]
        if row["fault"] in STRAGGLERS and each["class"] != "slow.regression"
    ]  # fmt: skip
    if not ratios:
        return ""
    ratios.sort()
    at = [ratios[int(share * (len(ratios) - 1))] for share in (0.1, 0.5, 0.9)]
    return (
        f"Stated cost / true cost, {len(ratios)} cases: median {at[1]:.2f}, 10-90% {at[0]:.2f}-{at[2]:.2f}\n"
    )


def markdown(rows: list[Row]) -> str:
    """Return all tables."""
    stragglers = [row for row in rows if row["fault"] in STRAGGLERS and row["shows"]]
    errors = Counter(row["error"] for row in rows if row["error"])
    parts = [by_class(rows)]
    if stragglers:
        parts += [precision_and_recall(rows, 1.2, 0.0), precision_and_recall(rows, 1.2, 0.03)]
        parts.append(by(stragglers, "severity", lambda row: row["severity"]))
        clear = [row for row in stragglers if row["severity"] >= 1.2]
        for name in ("noise", "layout", "num_ranks", "missing", "skew", "seen", "gpu", "since", "how"):
            parts.append(by(clear, name, lambda row, name=name: row[name]))
    for seen in ("windows", "calls"):
        parts.append(f"{seen}: " + costs([row for row in rows if row["seen"] == seen]))
    parts.append(f"Macro-F1 of class: {macro_f1(rows):.3f}\n")
    parts.append(abstentions(rows))
    unanswered = sum(not row["answerable"] for row in rows)
    parts.append(f"Refused to answer: {unanswered} of {len(rows)}; errors: {dict(errors)}\n")
    return "\n".join(parts)
