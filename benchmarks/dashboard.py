"""How fast the dashboard's views are: first page, interactions, what-ifs and memory, in a headless browser.

    python -m benchmarks.dashboard [--ranks 8] [--spans 500000] [--rounds 3] [--json]

Makes a run of that many spans, serves it with `dpro dashboard`, and opens it in Chromium. The first page is
timed from the request until its panels are there, with nothing computed before, and until all of them are
filled; of a run of more than 500,000 spans only the first time is measured. An interaction is a change of the
view, of the steps or of the ranks, timed from the change until all panels are filled, after each view was
shown once. Memory is that of the server and, after garbage collection, of the page's JavaScript. A what-if is
timed on the server, from its edits to the changes on the critical path, for edits that were not asked for
before. The timeline has its own benchmark: `benchmarks/timeline.py`.
`--json`: check -> {n, figures, bar, holds}.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.timeline import cpu_ms, memory_mb, serving
from dpro.dashboards.command import load
from dpro.dashboards.links import Link
from dpro.dashboards.report import html_of
from dpro.dashboards.views import whatif
from dpro.members import members_text
from dpro.schema import COLLECTIVES, SPANS, STEPS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.verdict.report import make_report
from tests.browser import settle, start_browser, wait

STEPS_OF_RUN = 10
OP_NS, GAP_NS, KERNEL_NS = 8_000, 2_000, 9_000
PAGE = "return document.querySelectorAll('#content .panel').length"
VIEWS = """
return [...document.querySelectorAll('#nav a')].map((link) => new URL(link.href).searchParams.get('view'))
"""
SMALL = 500_000  # spans up to which the bar of the first page is lower
BARS = {
    "first_page_s": {True: 1.0, False: 3.0},
    "interaction_p95_ms": 150.0,
    "server_mb": 1000.0,
    "server_peak_mb": 1000.0,
    "whatif_ms": 300.0,
    "report_mb": 5.0,
}
# Returns ms from a change of the link until all panels are filled and the page has been drawn.
CHANGED = """
const [changes, done] = arguments, began = performance.now();
dpro.go(changes);
let busy = false;
const settled = () => document.querySelectorAll("#content .panel").length > 0
  && !document.querySelector(".pending") && !document.querySelector("[data-dash-is-loading=true]");
const frame = () => {
  const now = performance.now();
  if (!settled()) busy = true;
  if ((busy || now - began > 250) && settled()) done(busy ? now - began : 0);
  else if (now - began > 60000) done(-1);
  else requestAnimationFrame(frame);
};
requestAnimationFrame(frame);
"""


def make_run(folder: Path, ranks: int, spans: int) -> None:
    """Write a run of operators that each launch a kernel, with an all-reduce at the end of each step."""
    each = spans // (3 * ranks)
    for rank in range(ranks):
        begin = np.arange(each, dtype=np.int64) * (OP_NS + GAP_NS)
        parts = [
            _spans(0, "cpu_op", "aten::op", begin, OP_NS, rank),
            _spans(1, "runtime", "cudaLaunchKernel", begin + 1000, 4000, rank),
            _spans(2, "kernel", "gemm", begin + 6000, KERNEL_NS, rank),
        ]
        ends = np.linspace(each // STEPS_OF_RUN, each - 1, STEPS_OF_RUN).astype(np.int64)
        moved = parts[2][ends.tolist()].select("rank", "window", "span_id", "start_ns", "duration_ns")
        moved = moved.with_columns(
            collective_id=pl.Series(range(ends.size)),
            sequence=pl.Series(range(ends.size)),
            op=pl.lit("all_reduce"),
            group=pl.lit("world"),
            group_ranks=pl.lit(members_text(range(ranks))),
            bytes_in=pl.lit(1 << 20),
        )
        bounds = np.r_[0, begin[ends] + OP_NS + GAP_NS]
        steps = {"start_ns": bounds[:-1], "duration_ns": np.diff(bounds), "step": np.arange(ends.size)}
        part = f"rank{rank:05}"
        write_part(folder, SPANS, part, pl.concat(parts))
        write_part(folder, COLLECTIVES, part, conform(COLLECTIVES, moved))
        write_part(folder, STEPS, part, pl.DataFrame(steps).with_columns(rank=rank, window=0))
    write_manifest(folder, Manifest(world_size=ranks, ranks=list(range(ranks))))


def _spans(sort: int, kind: str, name: str, begin: np.ndarray, lasts: int, rank: int) -> pl.DataFrame:
    number = np.arange(begin.size)
    where = {"device": 0, "stream": 7} if kind == "kernel" else {"pid": 1, "tid": 1}
    frame = pl.DataFrame({"span_id": 3 * number + sort, "start_ns": begin, "correlation": number})
    frame = frame.with_columns(rank=rank, window=0, kind=pl.lit(kind), name=pl.lit(name), duration_ns=lasts)
    frame = frame.with_columns(**where)
    correlation = pl.lit(-1) if kind == "cpu_op" else pl.col("correlation")
    return conform(SPANS, frame.with_columns(correlation=correlation))


def in_browser(run: Path, rounds: int) -> dict[str, Any]:
    """Measure s until the first page is there and filled, ms of each interaction, and MB after each round."""
    browser = start_browser()
    browser.set_script_timeout(120)
    found: dict[str, Any] = {"again_s": [], "interactions": {}, "memory": []}
    try:
        with serving(run) as (address, process):
            processes = process, browser.service.process.pid
            began, before = time.perf_counter(), [*map(cpu_ms, processes)]
            browser.get(address)
            wait(browser, PAGE)
            found["first_s"] = time.perf_counter() - began
            found["first_cpu_ms"] = [cpu_ms(each) - cpu for each, cpu in zip(processes, before)]
            if not rounds:
                return found
            settle(browser)
            found["filled_s"] = time.perf_counter() - began
            for _ in range(2):
                began = time.perf_counter()
                browser.get(address)
                wait(browser, PAGE)
                found["again_s"].append(time.perf_counter() - began)
            views = browser.execute_script(VIEWS)
            for view in views:  # so that interactions do not time what is computed only once
                browser.execute_script(f"dpro.go({{view: '{view}'}})")
                settle(browser)
            before = [*map(cpu_ms, processes)]
            for turn in range(rounds):
                for view in views:
                    changes = [
                        {"view": view},
                        {"steps": str(turn + 1)},
                        {"ranks": "0-1"},
                        {"steps": None, "ranks": None},
                    ]
                    for change in changes:
                        what = view if "view" in change else f"{view}: selection"
                        ms = browser.execute_async_script(CHANGED, change)
                        found["interactions"].setdefault(what, []).append(ms)
                browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
                heap = browser.execute_cdp_cmd("Runtime.getHeapUsage", {})["usedSize"]
                found["memory"].append({**memory_mb(process), "page": heap / 1e6})
            found["cpu_ms"] = [cpu_ms(each) - cpu for each, cpu in zip(processes, before)]
    finally:
        browser.quit()
    return found


def whatifs(run: Path) -> list[float]:
    """Measure ms on the server from edits to an answer, for edits that were not asked for before."""
    loaded = load(open_run(run))
    loaded.warm()
    fill = whatif.VIEW.sections["whatif-answer"]
    texts = ("heal:rank=1", "network:bandwidth=2", "no-launch", "scale:name=gemm,kind=kernel,factor=0.5")
    texts += ("heal:rank=2\nnetwork:bandwidth=4", "scale:name=gemm,kind=kernel,factor=0.9\nheal:rank=3")
    fill(loaded, Link(view="whatif", options={"edit": "no-comm"}))
    taken = []
    for text in texts:
        began = time.perf_counter()
        fill(loaded, Link(view="whatif", options={"edit": text}))
        taken.append(1000 * (time.perf_counter() - began))
    return taken


def report(run: Path) -> tuple[float, float]:
    """Return the size of the report as one page, in MB, and the CPU time to make it, in s."""
    begin = time.process_time()
    loaded = load(open_run(run))
    page = html_of(loaded, make_report(loaded))
    return len(page.encode()) / 1e6, time.process_time() - begin


def cpu(found: Sequence[float], per: float) -> dict[str, float]:
    """Return the CPU time of the server, with its background work, and of the browser, divided by `per`."""
    return {"server_cpu": found[0] / per, "browser_cpu": found[1] / per}


def checks(run: Path, spans: int, rounds: int) -> dict[str, Any]:
    """Measure all figures, each with its bar and whether it holds; the slowest interactions by name."""
    of = {"spans": spans, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    first_bar = BARS["first_page_s"][spans <= SMALL]
    found = in_browser(run, rounds if spans <= SMALL else 0)
    if spans > SMALL:
        first = {"first": found["first_s"]} | cpu(found["first_cpu_ms"], 1000)
        row = {"n": 1, "figures": first, "bar": first_bar, "holds": found["first_s"] <= first_bar}
        return {"first_page_s": row, "of": of}
    each = {what: [ms for ms in taken if ms > 0] for what, taken in found["interactions"].items()}
    taken = np.array([ms for of in each.values() for ms in of])
    slowest = sorted(each, key=lambda what: -max(each[what], default=0.0))[:5]
    edits = whatifs(run)
    megabytes, seconds = report(run)
    figures: dict[str, tuple[int, dict[str, float], float]] = {
        "first_page_s": (
            1,
            {"first": found["first_s"], "filled": found["filled_s"], "again": max(found["again_s"])}
            | cpu(found["first_cpu_ms"], 1000),
            found["first_s"],
        ),
        "interaction_p95_ms": (
            taken.size,
            {"median": float(np.median(taken)), "p95": float(np.percentile(taken, 95))}
            | cpu(found["cpu_ms"], sum(map(len, found["interactions"].values())))
            | {what: max(each[what]) for what in slowest if each[what]},
            float(np.percentile(taken, 95)),
        ),
        "server_mb": (rounds, found["memory"][-1], found["memory"][-1]["now"]),
        "server_peak_mb": (1, {"peak": found["memory"][-1]["peak"]}, found["memory"][-1]["peak"]),
        "whatif_ms": (len(edits), {"median": float(np.median(edits)), "slowest": max(edits)}, max(edits)),
        "report_mb": (1, {"size": megabytes, "cpu_s": seconds}, megabytes),
    }
    bars = BARS | {"first_page_s": first_bar}
    rows = {
        name: {"n": n, "figures": what, "bar": bars[name], "holds": value <= bars[name]}
        for name, (n, what, value) in figures.items()
    }
    return rows | {"of": of}


def main() -> None:
    """Make a run, measure, print."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--spans", type=int, default=500_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run, given.ranks, given.spans)
        found = checks(run, given.spans, given.rounds)
    if given.json:
        print(json.dumps(found))
        return
    of = found.pop("of")
    print(f"{of['spans']:,} spans of {given.ranks} ranks, load {of['load']:.1f} on {of['cores']} cores")
    for name, row in found.items():
        values = ", ".join(f"{what} {value:.3g}" for what, value in row["figures"].items())
        print(f"{name}: {values} (bar {row['bar']:g}: {'holds' if row['holds'] else 'does not hold'})")


if __name__ == "__main__":
    main()
