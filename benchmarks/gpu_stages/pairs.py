"""Changes to real jobs of a GPU: predicted by the replay, measured by dpro, and timed by the script itself.

`dpro try` makes each change to a job that it should matter to: once to the plain job, whose host runs far
ahead of the GPU, and once with `.item()` in each step, which makes the host wait. A larger batch is not a
change that dpro makes: the script does, and `dpro whatif` predicts it.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

from gpu_stages.check import Bench, Check

STEPS = 120
GPT: list[object] = ["gpt", "--layers", 6, "--batch", 4, "--length", 512]
LOADED: list[object] = ["resnet", "--bf16", "--batch", 64, "--loader", "--sample-work", 2]
# The change, and the job to which it is made; those first whose truth is the most wanted.
CHANGES: dict[str, tuple[str, list[object]]] = {
    "bf16": ("precision:dtype=bf16", GPT),
    "fused-optimizer": ("optimizer:impl=fused", [*GPT, "--bf16"]),
    "compile": ("compile", [*GPT, "--bf16"]),
    "reduce-overhead": ("compile:mode=reduce-overhead", ["small"]),
    "workers": ("workers:count=4", LOADED),
    "pinned-memory": ("dataloader:pin_memory=true", [*LOADED, "--workers", 8]),
    "gc": ("gc", ["small", "--objects", 1_000_000]),
}
REHEARSED = {  # pinned memory needs an accelerator, and a compiler takes its time
    "dataloader:pin_memory=true": "dataloader:prefetch_factor=4",
    "compile": "optimizer:impl=foreach",
    "compile:mode=reduce-overhead": "optimizer:impl=foreach",
}
NEEDS = {"precision:dtype=bf16": ["--shapes"]}  # options of a recording that a prediction needs
INSIDE = "what was measured is within the predicted interval, and within 5% of the truth"


def arguments_of(bench: Bench, job: list[object], item: bool) -> list[object]:
    """Return the arguments of a job."""
    words = [*job, "--steps", bench.few(STEPS, 40), *(["--item-every", 1] if item else [])]
    if bench.dry:
        words += ["--tiny"]
        if "--objects" in words:
            words[words.index("--objects") + 1] = 1000
        if "--workers" in words:
            words[words.index("--workers") + 1] = 1
    return words


def variables(bench: Bench) -> dict[str, object]:
    """Return variables that give each check a new ledger, so that no try widens the next one's interval."""
    return {"XDG_DATA_HOME": bench.folder / "data"}


def tried(bench: Bench, change: str, job: list[object], item: bool) -> None:
    """Try a change, and compare dpro's measurement with the script's own events."""
    command = bench.job("train.py", *arguments_of(bench, job, item))
    folder = bench.folder / "try"
    edit = REHEARSED.get(change, change) if bench.dry else change
    options: list[object] = ["--repeats", 1, "-o", folder]
    bench.unkept.append(folder)
    before = None
    if change in NEEDS:  # more than a try records by itself
        recording = ["--window-steps", 5, "--skip", 10, *NEEDS[change]]
        run, done = bench.record("before", command, recording, 90, variables(bench))
        before = done.ensure().last_json()["event_median_ms"]
        options += ["--baseline", run]
    done = bench.dpro(
        "try", edit, "--json", *options, "--", *command, limit_s=150, variables=variables(bench)
    )
    said = done.ensure().last_json()
    before, after = before or truth(folder, "baseline"), truth(folder, "changed")
    measured, base_ms = said["measured"]["ms"], said["baseline_ms"]
    true_ratio, ratio = after / before, measured / base_ms
    predicted = said["predicted"]
    bench.say(
        change, n=said["pairs"], predicted=predicted["ms"] / base_ms if predicted else None,
        low=predicted["low_ms"] / base_ms if predicted else None,
        high=predicted["high_ms"] / base_ms if predicted else None, why_not=said["not_predicted"],
        measured=ratio, truth=true_ratio, before_ms=base_ms, true_before_ms=before, verdict=said["verdict"],
        prediction_off_pct=100 * (predicted["ms"] / base_ms / true_ratio - 1) if predicted else None,
        measured_off_pct=100 * (ratio / true_ratio - 1), bar=INSIDE,
        holds=said["inside_interval"] is not False and abs(ratio / true_ratio - 1) <= 0.05,
    )  # fmt: skip


def truth(folder: Path, side: str) -> float:
    """Return ms per step by the script's own events: median over its runs.

    Raises:
        RuntimeError: no script printed its times.
    """
    medians = []
    for log in sorted(folder.glob(f"{side}-*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        medians += [
            json.loads(line)["event_median_ms"] for line in lines if line.startswith('{"event_mean_ms"')
        ]
    if not medians:
        raise RuntimeError(f"the script has not timed itself: {side}")
    return statistics.median(medians)


def larger_batch(bench: Bench, item: bool) -> None:
    """Double the batch: predict it from one recording, and measure it in the other."""
    sides: dict[str, Any] = {}
    for name, size in (("before", 4), ("after", 8)):
        job = ["gpt", "--layers", 6, "--length", 512, "--bf16", "--batch", size]
        command = bench.job("train.py", *arguments_of(bench, job, item))
        options = ["--window-steps", 5, "--skip", 10, "--memory"]
        run, done = bench.record(name, command, options, variables=variables(bench))
        sides[name] = run, done.ensure().last_json(), bench.ask("info", run)
    said = bench.ask("whatif", sides["before"][0], "--edit", "batch:factor=2", limit_s=90)
    times = {name: facts["step_time"]["typical_ms"] for name, (_, _, facts) in sides.items()}
    true_ratio = sides["after"][1]["event_median_ms"] / sides["before"][1]["event_median_ms"]
    measured = times["after"] / times["before"]
    figures = {
        "measured": measured,
        "truth": true_ratio,
        "measured_off_pct": 100 * (measured / true_ratio - 1),
    }
    if not said["predictions"]:
        bench.say("batch:factor=2", **figures, why_not=str(said.get("refused")), bar=INSIDE, holds=False)
        return
    [prediction], base_ms = said["predictions"], said["baseline_ms"]
    predicted, low, high = (prediction[name] / base_ms for name in ("predicted_ms", "low", "high"))
    bench.say(
        "batch:factor=2", **figures, predicted=predicted, low=low, high=high,
        prediction_off_pct=100 * (predicted / true_ratio - 1), bar=INSIDE,
        holds=low <= measured <= high and abs(measured / true_ratio - 1) <= 0.05,
    )  # fmt: skip


def _checks(item: bool) -> list[Check]:
    where, word = ", with .item() in each step" * item, "-item" * item
    checks = [
        Check(
            "pairs", f"{name}{word}", f"is {change} predicted and measured right{where}?",
            functools.partial(tried, change=change, job=job, item=item), 150,
        )
        for name, (change, job) in CHANGES.items()
    ]  # fmt: skip
    run = functools.partial(larger_batch, item=item)
    return [*checks, Check("pairs", f"batch{word}", f"is a larger batch predicted right{where}?", run, 120)]


CHECKS = (*_checks(item=False), *_checks(item=True))
