"""How fast the dashboard's views are: the first page, a what-if, and memory, in a real headless browser.

    python benchmarks/dashboard.py [--ranks 8] [--spans 500000] [--rounds 6]

Makes a run of that many spans, serves it from this process, and opens it in Chromium. The first page is
timed from asking for the address until its panels are there, with nothing computed before. A what-if is timed
on the server, from its edits to what changes on the critical path, for edits that were not asked for before.
Memory is that of the server and, after collecting garbage, of the page's JavaScript, after each round of all
views. The timeline has a benchmark of its own: `benchmarks/timeline.py`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dpro.analysis.report import make_report
from dpro.cli.dashboard import load
from dpro.dashboards.app import VIEWS
from dpro.dashboards.links import Link
from dpro.dashboards.report import html_of
from dpro.dashboards.views import whatif
from dpro.members import members_text
from dpro.schema import COLLECTIVES, SPANS, STEPS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part
from tests.browser import served, settle, start_browser, wait

STEPS_OF_RUN = 10
OP_NS, GAP_NS, KERNEL_NS = 8_000, 2_000, 9_000
PAGE = "return document.querySelectorAll('#content .panel').length"


def make_run(folder: Path, ranks: int, spans: int) -> None:
    """A run of operators that each launch a kernel, with an all-reduce at the end of each step."""
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
        group = pl.Series([list(range(ranks))] * ends.size, dtype=pl.List(pl.Int32))
        moved = moved.with_columns(
            collective_id=pl.Series(range(ends.size)),
            sequence=pl.Series(range(ends.size)),
            op=pl.lit("all_reduce"),
            group=pl.lit("world"),
            group_ranks=members_text(group),
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


def pages(run: Path) -> list[float]:
    """ms until the first page is there, the first time and twice again."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    browser = start_browser()
    first = []
    try:
        loaded = load(open_run(run))
        with served(loaded) as address:
            for _ in range(3):  # with nothing worked out, then with all
                began = time.perf_counter()
                browser.get(address)
                wait(browser, PAGE)
                first.append(1000 * (time.perf_counter() - began))
                loaded.warm()
    finally:
        browser.quit()
    return first


def whatifs(run: Path) -> list[float]:
    """ms on the server from edits to an answer, for edits that were not asked for before."""
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


def memory(run: Path, rounds: int) -> list[tuple[float, float]]:
    """MB of the server, and of the page's JavaScript, after each round of all views."""
    browser = start_browser()
    browser.set_script_timeout(120)
    found = []
    try:
        loaded = load(open_run(run))
        loaded.warm()
        with served(loaded) as address:
            browser.get(address)
            for _ in range(rounds):
                for view in VIEWS:  # within one page, as people do
                    browser.execute_script(f"dpro.go({{view: '{view.name}', time: null}})")
                    settle(browser)
                browser.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
                heap = browser.execute_cdp_cmd("Runtime.getHeapUsage", {})["usedSize"]
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                found.append((pages * os.sysconf("SC_PAGE_SIZE") / 1e6, heap / 1e6))
    finally:
        browser.quit()
    return found


def report(run: Path) -> tuple[float, float]:
    """Size of the report as one page, in MB, and the CPU time that it takes, s."""
    begin = time.process_time()
    loaded = load(open_run(run))
    page = html_of(loaded, make_report(loaded))
    return len(page.encode()) / 1e6, time.process_time() - begin


def main() -> None:
    """Make a run, measure, print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=8)
    options.add_argument("--spans", type=int, default=500_000)
    options.add_argument("--rounds", type=int, default=6)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        make_run(run, given.ranks, given.spans)
        megabytes, seconds = report(run)
        print(f"report as one page: {megabytes:.1f} MB, {seconds:.1f} s of CPU with all that it shows")
        first = pages(run)
        print(f"first page, ms: {', '.join(f'{ms:.0f}' for ms in first)}")
        taken = whatifs(run)
        print(f"what-if on the server, ms: median {np.median(taken):.0f}, slowest {max(taken):.0f}")
        for server, page in memory(run, given.rounds):
            print(f"memory after a round, MB: server {server:.0f}, page {page:.1f}")
        print(f"load of the machine meanwhile: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
