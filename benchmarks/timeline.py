"""How fast the dashboard's timeline is on many spans, and what memory its server takes, in a browser.

    python -m benchmarks.timeline [--ranks 16] [--spans 4000000] [--like RUN] [--turns 60] [--json]

Makes a run of that many spans by repeating those of a real run (`--like`), or of a made-up step of nested
operators, launches, kernels and collectives. `dpro dashboard` serves it. Measured are the time from the
request until the first lanes are drawn, with nothing read before; the time from each turn of the wheel until
the new view is drawn completely, the server's answer included; a search; and the memory of the server after
all ranks were read, zoomed and searched. `--json`: check -> {n, figures, bar, holds}.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpro.members import members_text
from dpro.schema import COLLECTIVES, SPANS, STEPS, conform
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.table import Table
from tests.browser import start_browser, wait

BARS = {"first_lanes_s": 3.0, "wheel_p95_ms": 150.0, "server_mb": 1000.0}
PAUSE_NS = 1_000_000  # between repetitions
LAYERS = 48
NAMES = (
    "aten::linear",
    "aten::addmm",
    "aten::layer_norm",
    "aten::gelu",
    "aten::scaled_dot_product_attention",
)
FIRST = "const t = window.dproTimeline; return t && t.root && t.data && t.data.size > 0 && !t.since"
ALL = "return dproTimeline.info.complete && dproTimeline.fitting && !dproTimeline.since"
STILL = "return !dproTimeline.since"
SEARCH = "const box = dproTimeline.findBox; box.value = 'kernel'; box.dispatchEvent(new Event('input'))"


def made_up(folder: Path) -> Run:
    """Write one step of one rank: operators two deep that each launch a kernel, with a backward thread."""
    rows: list[dict[str, Any]] = []
    chance, at = np.random.default_rng(5), {10: 0, 30: 0}

    def add(kind: str, name: str, begin: int, lasts: int, **more: int) -> int:
        rows.append(
            {
                "span_id": len(rows),
                "kind": kind,
                "name": name,
                "start_ns": begin,
                "duration_ns": lasts,
                **more,
            }
        )
        return len(rows) - 1

    free, moved = 0, []
    for thread, words in ((10, ""), (30, "Backward")):
        at[thread] = max(at.values())
        begun = at[thread]
        for layer in range(LAYERS):
            for name in NAMES:
                lasts = int(chance.integers(12_000, 60_000))
                begin, call = at[thread], len(rows)
                add("cpu_op", f"{name}{words}", begin, lasts, tid=thread)
                add("cpu_op", f"aten::_{name[6:]}", begin + 2_000, lasts - 4_000, tid=thread)
                add("runtime", "cudaLaunchKernel", begin + 4_000, 4_000, tid=thread, correlation=call)
                free = max(free, begin + 9_000)
                busy = int(chance.integers(8_000, 90_000))
                add(
                    "kernel",
                    f"sm90_{name[6:]}{words}_kernel",
                    free,
                    busy,
                    stream=7,
                    device=0,
                    correlation=call,
                )
                free += busy + 1_000
                at[thread] += lasts + int(chance.integers(500, 4_000))
            if layer % 4 == 3:
                number = add("kernel", "ncclDevKernel_AllGather_RING_LL", free, 200_000, stream=20, device=0)
                moved.append(number)
        add("annotation", f"{words or 'Forward'}", begun, at[thread] - begun, tid=thread)
    end = max(free, *at.values()) + 300_000
    add("annotation", "ProfilerStep#1", 0, end, tid=10)
    default = dict.fromkeys(("tid", "stream", "device", "correlation"), -1)
    spans = pl.DataFrame([default | row for row in rows]).with_columns(rank=0, window=0)
    ran = spans.filter(pl.col("span_id").is_in(moved)).select(
        "rank", "window", "span_id", "start_ns", "duration_ns"
    )
    ran = ran.with_columns(collective_id=pl.col("span_id"), op=pl.lit("all_gather"), group=pl.lit("world"))
    write_part(folder, SPANS, "rank00000", conform(SPANS, spans))
    write_part(folder, COLLECTIVES, "rank00000", conform(COLLECTIVES, ran))
    steps = pl.DataFrame({"rank": [0], "window": [0], "step": [1], "start_ns": [0], "duration_ns": [end]})
    write_part(folder, STEPS, "rank00000", conform(STEPS, steps))
    write_manifest(folder, Manifest(world_size=1, ranks=[0]))
    return open_run(folder)


def repeated(source: Run, folder: Path, ranks: int, spans: int) -> int:
    """Write a run whose ranks repeat those of another.

    Args:
        source: the other run, for the spans of its first deep window.
        folder: where to write.
        ranks: of the new run.
        spans: smallest number of the new run's spans.

    Returns:
        The number of its spans.
    """
    window = int(source.table(SPANS, ["window"])["window"].min() or 0)  # type: ignore[call-overload]
    tables = [
        (table, source.table(table).filter(pl.col("window") == window))
        for table in (SPANS, COLLECTIVES, STEPS)
    ]
    spans_of = tables[0][1]
    known = spans_of["rank"].unique().sort().to_list()
    end = pl.col("start_ns") + pl.col("duration_ns").clip(0)
    origin, last = spans_of.select(pl.col("start_ns").min(), end.max().alias("end")).row(0)
    length, total = last - origin + PAUSE_NS, 0
    for rank in range(ranks):
        mine = pl.col("rank") == known[rank % len(known)]
        times = -(-spans // ranks // spans_of.filter(mine).height)
        for table, everything in tables:
            frame = everything.filter(mine)
            copies = [_moved(table, frame, rank, ranks, number, length, origin) for number in range(times)]
            written = pl.concat(copies) if copies else frame
            write_part(folder, table, f"rank{rank:05}", conform(table, written.sort(table.sort_by)))
            total += written.height if table is SPANS else 0
    write_manifest(folder, Manifest(world_size=ranks, ranks=list(range(ranks))))
    return total


def _moved(
    table: Table, frame: pl.DataFrame, rank: int, ranks: int, number: int, length: int, origin: int
) -> pl.DataFrame:
    """Make one repetition: later, with new ids, of another rank."""
    changed = [pl.lit(rank, pl.Int32).alias("rank"), pl.lit(0, pl.Int32).alias("window")]
    changed += [pl.col("start_ns") - origin + number * length]
    ids = ("span_id", "launch_span_id", "correlation", "external_id", "sequence_number", "collective_id")
    for name in ids:
        if name in frame.columns:
            moved = pl.col(name) + number * 10_000_000
            changed.append(pl.when(pl.col(name) >= 0).then(moved).otherwise(pl.col(name)).alias(name))
    if table is COLLECTIVES:
        changed.append(pl.lit(members_text(range(ranks))).alias("group_ranks"))
        changed.append(pl.lit(-1, pl.Int64).alias("sequence"))
    if table is STEPS:
        changed.append(pl.col("step") + number * frame["step"].n_unique())
    return frame.with_columns(changed)


@contextmanager
def serving(run: Path) -> Iterator[tuple[str, int]]:
    """Serve a run with `dpro dashboard`; yield the address and the process id."""
    command = [sys.executable, "-m", "dpro", "dashboard", str(run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0], process.pid
        finally:
            process.terminate()


def cpu_ms(process: int) -> float:
    """Return the CPU time of a process and its descendants, in ms."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            stats[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    parent = {number: int(stat[1]) for number, stat in stats.items()}
    family, grown = {process}, True
    while grown:
        more = {number for number, of in parent.items() if of in family} - family
        family, grown = family | more, bool(more)
    ticks = sum(int(stat[11]) + int(stat[12]) for number, stat in stats.items() if number in family)
    return 1000 * ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(process: int) -> dict[str, float]:
    """Return the resident memory of a process now, and at its peak, in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return {"now": int(found["VmRSS"].split()[0]) / 1e3, "peak": int(found["VmHWM"].split()[0]) / 1e3}


def measured(run: Path, turns: int) -> dict[str, Any]:
    """Measure lanes, wheel, search, memory and CPU time in a browser."""
    browser = start_browser()
    try:
        with serving(run) as (address, process):
            token = address.partition("?token=")[2]
            begin = time.perf_counter()
            browser.get(f"{address.partition('?')[0]}?view=timeline&token={token}")
            wait(browser, FIRST)
            first = time.perf_counter() - begin
            wait(browser, ALL)
            everything = time.perf_counter() - begin
            time.sleep(1)
            browser.execute_script("dproTimeline.waits.length = 0")
            before = cpu_ms(process), cpu_ms(browser.service.process.pid)
            turn_the_wheel(browser, turns)
            after = cpu_ms(process), cpu_ms(browser.service.process.pid)
            waits = browser.execute_script("return dproTimeline.waits")
            begin = time.perf_counter()
            browser.execute_script(SEARCH)
            wait(browser, "return document.querySelector('.found').textContent.includes('spans')")
            searched = time.perf_counter() - begin - 0.25  # the page waits this long for more letters
            wait(browser, STILL)
            turn_the_wheel(browser, turns // 3)
            return {
                "first_lanes_s": first, "all_lanes_s": everything, "wheel_ms": waits, "search_s": searched,
                "server_mb": memory_mb(process),
                "cpu_ms": [(end - start) / turns for start, end in zip(before, after, strict=True)],
            }  # fmt: skip
    finally:
        browser.quit()


def turn_the_wheel(browser: Any, turns: int) -> None:
    """Turn the wheel with Ctrl, in and out, at places all over the lanes; wait until each view is drawn."""
    box = browser.execute_script("return dproTimeline.frame.getBoundingClientRect().toJSON()")
    chance = np.random.default_rng(3)
    for turn in range(turns):
        inwards = turn % 20 < 12
        wanted = {
            "type": "mouseWheel", "x": box["left"] + box["width"] * chance.uniform(0.3, 0.95),
            "y": box["top"] + box["height"] * chance.uniform(0.3, 0.9), "deltaX": 0,
            "deltaY": -120 if inwards else 180, "modifiers": 2,
        }  # fmt: skip
        before = browser.execute_script("return dproTimeline.waits.length")
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", wanted)
        wait(browser, f"return dproTimeline.waits.length > {before} && !dproTimeline.since")


def checks(found: dict[str, Any], ranks: int, spans: int) -> dict[str, Any]:
    """Return the figures, each with its bar and whether it holds."""
    wheel = np.array(found["wheel_ms"])
    figures = {
        "first_lanes_s": {
            "first": found["first_lanes_s"],
            "all": found["all_lanes_s"],
            "search": found["search_s"],
        },
        "wheel_p95_ms": {
            "median": float(np.median(wheel)),
            "p95": float(np.percentile(wheel, 95)),
            "server_cpu": found["cpu_ms"][0],
            "browser_cpu": found["cpu_ms"][1],
        },
        "server_mb": found["server_mb"],
    }
    values = (found["first_lanes_s"], figures["wheel_p95_ms"]["p95"], found["server_mb"]["peak"])
    counts = (1, wheel.size, 1)
    rows = {
        name: {"n": n, "figures": figures[name], "bar": BARS[name], "holds": value <= BARS[name]}
        for name, n, value in zip(BARS, counts, values, strict=True)
    }
    return rows | {
        "of": {"ranks": ranks, "spans": spans, "load": os.getloadavg()[0], "cores": os.cpu_count()}
    }


def main() -> None:
    """Make a run, measure, print."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, default=16)
    options.add_argument("--spans", type=int, default=4_000_000)
    options.add_argument("--like", type=Path)
    options.add_argument("--turns", type=int, default=60)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = open_run(given.like) if given.like else made_up(Path(folder) / "step")
        run = Path(folder) / "run"
        spans = repeated(source, run, given.ranks, given.spans)
        found = checks(measured(run, given.turns), given.ranks, spans)
    if given.json:
        print(json.dumps(found))
        return
    print(f"{spans:,} spans of {given.ranks} ranks, load {found['of']['load']:.1f} on {os.cpu_count()} cores")
    for name, row in found.items():
        if name != "of":
            values = ", ".join(f"{what} {value:.3g}" for what, value in row["figures"].items())
            print(f"{name}: {values} (bar {row['bar']:g}: {'holds' if row['holds'] else 'does not hold'})")


if __name__ == "__main__":
    main()
