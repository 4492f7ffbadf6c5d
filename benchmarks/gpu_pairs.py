"""How well `dpro whatif` predicts changes of GPU jobs, by traces from before and after a change.

python -m benchmarks.gpu_pairs [--pairs FILE] [--folder DIR] [--only NAME …] [--json]

FILE (pairs.json in DIR, which `DPRO_GPU_PAIRS` names) has an object per pair: `name`, `change`, `before` and
`after` (lists of `file`, in DIR), `edits` (ways to ask for the change, all compared; `a+b` are two edits
together), `clean` (whether steps can be compared), `note`, and `real`, measured by others: `before_ms`,
`after_ms`, `before_kernel_ms`, `after_kernel_ms`. Comparisons that need a missing key are left out.

Predictions of clean pairs are compared with the step that dpro measures after the change, and (`…_real`) with
`real`; gains are per samples of a step before. Of other pairs, kernel time is compared where the note says
`kernel time`, and the grade must not be good where it says `cold`. `steps_measured`: dpro measures the real
steps. `same_gain`: `dpro explain` and the search name the gain of an edit as `dpro whatif` does. `--json`
prints one object: check → {n, figures, bar, holds}; `answered` has each pair in `judged`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import as_program
from benchmarks.accuracy.bars import signs
from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.whatif import search_once, what_if
from dpro.analysis.predictions import trust_and_baseline
from dpro.cli.analysis import analyse
from dpro.documents import finite
from dpro.errors import DproError, InputError
from dpro.replay.graph import NodeKind
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.predict import Prediction, apply_all, measured_ns
from dpro.replay.whatif.registry import parse_edit
from dpro.selection import ALL
from dpro.units import NS_PER_MS, ms
from dpro.verdict.verdict import explain

SHARED = Path(__file__).resolve().parents[2] / "shared"
FOLDER = Path(os.environ.get("DPRO_GPU_PAIRS", SHARED / "gpu_pairs"))
SIDES = ("before", "after")
TRUTHS = ("own", "real")  # of the step after: measured by dpro, and from the file
TIMES = ("predicted", "low", "high", "gain", "gain_low", "gain_high")
ANSWERED, HELD, SIGNS, MEASURED = 0.9, 0.85, 1.0, 0.9  # shares
ERRORS_PCT = {"median_pct": 15.0, "worst_pct": 50.0}
WIDTH = 2.0  # bar for the median ratio of an interval's upper to its lower end
AGREE = 0.03  # largest difference of measured steps that agree
SAME = 0.01  # largest difference of gains that agree

Row = dict[str, Any]


def open_side(pair: Row, side: str, folder: Path, links: Path) -> Analysis:
    """Open the run of one side: its file, or a folder of links to its files, one per rank.

    Raises:
        DproError: there is no file, or it cannot be read.
    """
    files = [(folder / entry["file"]).resolve() for entry in pair.get(side) or ()]
    if not files:
        raise InputError(f"no file {side} the change")
    if len(files) == 1:
        return analyse(str(files[0]))
    together = links / side
    together.mkdir()
    for number, file in enumerate(files):
        (together / f"{number:04}-{file.name}").symlink_to(file)
    return analyse(str(together))


def read_edits(text: str) -> list[Edit]:
    """Parse one edit, or several joined by plus signs.

    Raises:
        UsageError: there is no such edit.
    """
    try:
        return [parse_edit(part.strip()) for part in text.split("+")]
    except DproError:
        return [parse_edit(text)]


def compare_step(prediction: Prediction, before: float | None, after: float | None) -> Row | None:
    """Compare a prediction with the steps of both sides, in ms; None where one is not known."""
    if not before or not after:
        return None
    samples = prediction.samples
    gain = before / after * samples
    low, high = (prediction.speedup_at(end) for end in (prediction.gain_low_ns, prediction.gain_high_ns))
    return {
        "error_pct": 100 * (ms(prediction.predicted_ns) / after - 1),
        "step_held": ms(prediction.low_ns) <= after <= ms(prediction.high_ns),
        "gain": gain,
        "gain_held": low <= gain <= high,
        **signs(before, after / samples, before - ms(prediction.gain_ns), None),
    }


def compare_kernels(analysis: Analysis, edits: Sequence[Edit], real: Row) -> Row | None:
    """Compare kernel time under edits with the real one, relative to before; None where one is unknown."""
    before, after = (real.get(f"{side}_kernel_ms") for side in SIDES)
    if not before or not after:
        return None
    graphs = apply_all(analysis.built.predictive, edits).graphs
    took = [graph.nodes.duration[graph.nodes.kind == NodeKind.KERNEL].sum() for graph in graphs]
    ratio, real_ratio = float(took[-1] / took[0]), after / before
    return {"ratio": ratio, "real_ratio": real_ratio, "error_pct": 100 * (ratio / real_ratio - 1)}


def compare_elsewhere(analysis: Analysis, prediction: Prediction) -> Iterator[Row]:
    """Yield the gains that `explain` and the search name for the same edits, and whether they agree."""
    gains = [prediction.speedup_at(ns) for ns in (prediction.gain_low_ns, prediction.gain_high_ns)]
    text = "+".join(map(str, prediction.edits))
    for advice in explain(analysis).advice:
        if advice.check in (f"dpro whatif RUN --edit {text}", f"dpro try {text}"):
            named = [float(gain or np.nan) for gain in (advice.gain_low, advice.gain_high)]
            says = f"explain x{named[0]:.2f} to {named[1]:.2f}, whatif x{gains[0]:.2f} to {gains[1]:.2f}"
            yield {"edit": says, "same": bool(np.allclose(named, gains, rtol=SAME))}
    for other in search_once(analysis).predictions:
        if other.edits == prediction.edits:
            says = f"search x{other.speedup:.2f}, whatif x{prediction.speedup:.2f}"
            yield {"edit": says, "same": bool(np.isclose(other.speedup, prediction.speedup, rtol=SAME))}


def ask(text: str, analysis: Analysis, pair: Row, steps: dict[str, list[float | None]]) -> Row:
    """Predict one way to ask for the change, and compare; a refusal or failure becomes the row.

    Args:
        steps: of both sides, ms: dpro's, and the real one.
    """
    try:
        edits = read_edits(text)
        answer = what_if(analysis, edits)
        if not answer.predictions:
            return {"edit": text, "refused": answer.document.refused[0].reason}
        prediction = answer.predictions[0]
        row: Row = {"edit": text, "samples": prediction.samples}
        row |= {f"{name}_ms": finite(getattr(prediction, f"{name}_ns") / NS_PER_MS) for name in TIMES}
        row["elsewhere"] = list(compare_elsewhere(analysis, prediction))
        if pair.get("clean"):
            pairs = zip(TRUTHS, zip(*(steps[side] for side in SIDES)))
            row |= {truth: compare_step(prediction, before, after) for truth, (before, after) in pairs}
        elif "kernel time" in (pair.get("note") or ""):
            row["kernels"] = compare_kernels(analysis, edits, pair.get("real") or {})
        return row
    except Exception as error:  # any error fails only this question
        return {"edit": text, "failed": describe(error)}


def describe(error: Exception) -> str:
    """Word an error on one line; name its type if it is a defect."""
    return str(error) if isinstance(error, DproError) else f"{type(error).__name__}: {error}"


def judge(pair: Row, folder: Path) -> Row:
    """Ask all questions of a pair."""
    row: Row = {key: pair.get(key) or "" for key in ("name", "change", "clean", "note")}
    try:
        with TemporaryDirectory() as links:
            opened = {side: open_side(pair, side, folder, Path(links)) for side in SIDES}
            real = pair.get("real") or {}
            steps = {
                side: [ms(measured_ns(*trust_and_baseline(run, ALL))), real.get(f"{side}_ms")]
                for side, run in opened.items()
            }
            before = opened["before"]
            row |= {"steps": steps, "grade": before.trust.grade, "files": [pair[side] for side in SIDES]}
            row["questions"] = [ask(text, before, pair, steps) for text in pair.get("edits") or ()]
    except Exception as error:  # a damaged file fails only its pair
        row["failed"] = describe(error)
    return row


def check_share(rows: Sequence[Row], right: Callable[[Row], bool], bar: float) -> Row:
    """Check the share of right answers; list wrong ones, and count pairs with at least one right answer."""
    wrong = [f"{row['name']}: {row['edit']}" for row in rows if not right(row)]
    share = 1 - len(wrong) / len(rows) if rows else None
    pairs, pairs_right = ({row["name"] for row in some} for some in (rows, filter(right, rows)))
    figures: Row = {"right": len(rows) - len(wrong), "share": share, "wrong": wrong}
    figures |= {"pairs": len(pairs), "pairs_right": len(pairs_right)}
    return check(len(rows), figures, {"share": bar}, share is not None and share >= bar)


def check_errors(rows: Sequence[Row]) -> Row:
    """Check the median and largest absolute error of predictions."""
    sizes = [abs(row["error_pct"]) for row in rows] or [0.0]
    figures = {"median_pct": median(sizes), "worst_pct": max(sizes)}
    return check(len(rows), figures, ERRORS_PCT, all(figures[key] <= bar for key, bar in ERRORS_PCT.items()))


def check(n: int, figures: Row, bar: Row, holds: bool) -> Row:
    """Make the row of a check; without anything to judge it neither holds nor misses."""
    return {"n": n, "figures": figures if n else {}, "bar": bar, "holds": holds if n else None}


def check_pairs(pairs: Sequence[Row], asked: Sequence[Row]) -> Row:
    """Check the share of answered questions; list all pairs, failed ones, and those not compared."""
    result = check_share(asked, lambda row: "predicted_ms" in row, ANSWERED)
    failed = {pair["name"]: pair["failed"] for pair in pairs if "failed" in pair}
    compared = {row["name"] for row in asked if any(row.get(key) for key in (*TRUTHS, "kernels"))}
    kept = [pair["name"] for pair in pairs if pair["name"] not in compared]
    result["figures"] |= {"failed": failed, "not_compared": kept, "judged": list(pairs)}
    return result | {"holds": False if failed else result["holds"]}


def check_steps(pairs: Sequence[Row]) -> Row:
    """Check that dpro measures the steps of clean traces, each once, as others do."""
    traces = {
        ", ".join(entry["file"] for entry in files): {"name": pair["name"], "steps": pair["steps"][side]}
        for pair in pairs
        for side, files in zip(SIDES, pair.get("files", ()))
        if pair["clean"] and pair["steps"][side][1]
    }
    rows = [
        {"edit": f"{files} {own:.3f}, not {real:.3f} ms", "name": trace["name"], "error": abs(own / real - 1)}
        for files, trace in traces.items()
        for own, real in [trace["steps"]]
    ]
    return check_share(rows, lambda row: bool(row["error"] <= AGREE), MEASURED)


def checks(pairs: Sequence[Row]) -> dict[str, Row]:
    """Compute all checks of judged pairs."""
    asked = [{"name": pair["name"], **row} for pair in pairs for row in pair.get("questions", ())]
    answered = [row for row in asked if "predicted_ms" in row]
    result = {"answered": check_pairs(pairs, asked)}
    for truth, suffix in zip(TRUTHS, ("", "_real")):
        rows = [{**row, **row[truth]} for row in answered if row.get(truth)]
        result[f"step_held{suffix}"] = check_share(rows, lambda row: bool(row["step_held"]), HELD)
        result[f"gain_held{suffix}"] = check_share(rows, lambda row: bool(row["gain_held"]), HELD)
        effects = [row for row in rows if row["has_effect"]]
        result[f"sign_right{suffix}"] = check_share(effects, lambda row: bool(row["sign_right"]), SIGNS)
        result[f"error{suffix}"] = check_errors(rows)
    ends = [(row["low_ms"], row["high_ms"]) for row in answered if row.get("own")]
    widths = [high / low if low and high else float("inf") for low, high in ends]
    width = median(widths or [1.0])
    result["width"] = check(len(widths), {"median": finite(width)}, {"median": WIDTH}, width <= WIDTH)
    result["steps_measured"] = check_steps(pairs)
    result["kernels"] = check_errors([row["kernels"] for row in answered if row.get("kernels")])
    cold = [pair | {"edit": pair["grade"]} for pair in pairs if "cold" in pair["note"] and "grade" in pair]
    result["cold_not_good"] = check_share(cold, lambda row: row["grade"] != "good", 1.0)
    named = [{"name": row["name"], **other} for row in answered for other in row["elsewhere"]]
    result["same_gain"] = check_share(named, lambda row: bool(row["same"]), 1.0)
    return result


def print_table(pairs: Sequence[Row], results: dict[str, Row]) -> None:
    """Print a line for each question, and one for each check."""
    columns = f"{'before':>8} {'after':>8} {'predicted (low to high)':>28}"
    print(f"{'pair: edit':58} {columns}  error  step gain sign")
    for pair in pairs:
        for row in pair.get("questions", ()) or [{"edit": "", "failed": pair.get("failed", "no edits")}]:
            name = f"{pair['name']}: {row['edit']}"
            if "predicted_ms" not in row:
                print(f"{name:58} {row.get('refused') or row.get('failed')}")
                continue
            before, after = (pair["steps"][side][0] for side in SIDES)
            ends = f"{row['predicted_ms']:.3f} ({row['low_ms'] or 0:.3f} to {row['high_ms'] or np.inf:.3f})"
            line = f"{name:58} {before:8.3f} {after:8.3f} {ends:>28}"
            if own := row.get("own"):
                says = ["held" if own[key] else "MISS" for key in ("step_held", "gain_held")]
                sign = "" if not own["has_effect"] else "right" if own["sign_right"] else "WRONG"
                print(f"{line} {own['error_pct']:+5.0f}%  {says[0]} {says[1]} {sign}")
            elif kernels := row.get("kernels"):
                print(f"{line}  kernels x{kernels['ratio']:.2f}, really x{kernels['real_ratio']:.2f}")
            else:
                print(f"{line}  not compared: {pair['note'].strip()}")
    for name, result in results.items():
        figures = {key: value for key, value in result["figures"].items() if key != "judged"}
        verdict = {True: "holds", False: "MISSED", None: ""}[result["holds"]]
        bar = json.dumps(result["bar"])
        print(f"{name:16} n {result['n']:3} {verdict:7} {json.dumps(figures)} (bar {bar})")


def main() -> None:
    """Judge the pairs of a file.

    Raises:
        DproError: it is not a list of pairs, or has no pair of that name.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--pairs", type=Path, help="default: pairs.json in the folder")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=["*"], help="names of pairs, or patterns"
    )
    parser.add_argument("--json", action="store_true", help="the checks as one object")
    options = parser.parse_args()
    file = options.pairs or options.folder / "pairs.json"
    try:
        pairs = json.loads(file.read_text(encoding="utf-8"))
        chosen = [pair for pair in pairs if any(fnmatch(pair.get("name", ""), name) for name in options.only)]
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: no list of pairs ({error})") from error
    if not chosen:
        raise InputError(f"{file}: no pair {', '.join(options.only)}")
    judged = []
    for pair in chosen:
        begun = time.monotonic()
        judged.append(judge(pair, options.folder))
        print(f"{judged[-1]['name']}: {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
    results = checks(judged)
    if options.json:
        print(json.dumps(results))
    else:
        print_table(judged, results)


if __name__ == "__main__":
    as_program(main)
