"""Record controlled pairs of runs of the small server: one setting changes, the requests stay the same.

    python -m benchmarks.serving_server.pairs FOLDER --python PYTHON

In: a Python that has transformers. Out: in the folder, a run for each setting and `pairs.json`, a list of
{before, after, edit}. `arrivals:rate` and `prompts:length` are factors; `chunked-prefill:tokens=0` is off.
The edit of two pools has the speed of the link between them. Existing runs are kept, so that an interrupted
recording can continue.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl

from dpro.opening import ensure_finished
from dpro.schema import REQUESTS
from dpro.store import is_run, open_run

SERVER, POOLS = (Path(__file__).with_name(name) for name in ("server.py", "pools.py"))
BASE = {"rate": 10, "requests": 120, "prompt": 160, "output": 32, "max-batch": 8, "chunk": 0}
LONG = {"rate": 5, "requests": 60, "prompt": 320, "output": 48, "max-batch": 6, "chunk": 0, "seed": 1}
SETTINGS: dict[str, dict[str, float]] = {
    "base": BASE,
    "batch2": BASE | {"max-batch": 2},
    "batch4": BASE | {"max-batch": 4},
    "chunk64": BASE | {"chunk": 64},
    "fast": BASE | {"rate": 10 * 1.5},
    "slow": BASE | {"rate": 10 * 0.6},
    "half": BASE | {"prompt": 80},
    "double": BASE | {"prompt": 320},
    "long": LONG,
    "long_batch2": LONG | {"max-batch": 2},
    "long_chunk128": LONG | {"chunk": 128},
    "base_pools": BASE,
    "fast_pools": BASE | {"rate": 10 * 1.5},
    "long_pools": LONG,
}
PAIRS = (
    ("base", "batch2", "max-batch:requests=2"),
    ("base", "batch4", "max-batch:requests=4"),
    ("batch2", "base", "max-batch:requests=8"),
    ("base", "chunk64", "chunked-prefill:tokens=64"),
    ("chunk64", "base", "chunked-prefill:tokens=0"),
    ("base", "fast", "arrivals:rate=1.5"),
    ("base", "slow", "arrivals:rate=0.6"),
    ("base", "half", "prompts:length=0.5"),
    ("base", "double", "prompts:length=2"),
    ("long", "long_batch2", "max-batch:requests=2"),
    ("long", "long_chunk128", "chunked-prefill:tokens=128"),
    ("base", "base_pools", "pools:prefill=1,decode=1"),
    ("fast", "fast_pools", "pools:prefill=1,decode=1"),
    ("long", "long_pools", "pools:prefill=1,decode=1"),
)
CLIENT = "client.json"
IN_POOLS = "_pools"  # suffix of settings whose server is `pools.py`
TRIES = 3  # recordings of one setting
EQUAL = 0.03  # largest relative difference of the machine's speed between two runs of a pair


def main() -> None:
    """Record the settings, and list the recorded pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable, help="one that has transformers")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), help="settings to record")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        family = args.folder / ("long" if name.startswith("long") else "base")
        record_equally(args.folder / name, family, SETTINGS[name], args.python)
    pairs = [
        {"before": before, "after": after, "edit": edit + linked(args.folder / after)}
        for before, after, edit in PAIRS
        if is_run(args.folder / before) and is_run(args.folder / after)
    ]
    (args.folder / "pairs.json").write_text(json.dumps(pairs, indent=1) + "\n", encoding="utf-8")


def record_equally(run: Path, base: Path, setting: dict[str, float], python: str) -> None:
    """Record a setting until the machine is as fast as in the base; keep the run nearest to it."""
    if is_run(run):
        return
    tries: list[tuple[float, Path]] = []
    for number in range(TRIES):
        tried = run.with_name(f".{run.name}-{number}")
        shutil.rmtree(tried, ignore_errors=True)
        record(tried, setting, python)
        first = base if is_run(base) else tried
        apart = max(
            abs(ours / theirs - 1) for ours, theirs in zip(pace_ms(tried), pace_ms(first), strict=True)
        )
        tries.append((apart, tried))
        if apart <= EQUAL:
            break
    apart, best = min(tries)
    best.rename(run)
    for _, other in tries:
        shutil.rmtree(other, ignore_errors=True)
    prompt_ms, token_ms = pace_ms(run)
    print(
        f"{run.name}: {prompt_ms:.2f} and {token_ms:.2f} ms, {apart:.1%} from the base, of {len(tries)}",
        file=sys.stderr,
    )


def pace_ms(run: Path) -> tuple[float, float]:
    """Return the machine's speed: ms of a prompt and of a token, of equal requests answered alone."""
    rows = open_run(run).table(REQUESTS).filter(pl.col("name").str.starts_with("warm"))
    prompt = pl.col("first_token_ns") - pl.col("scheduled_ns")
    per_token = (pl.col("end_ns") - pl.col("first_token_ns")) / (pl.col("output_tokens") - 1)
    return tuple(rows.select(prompt.median() / 1e6, per_token.median() / 1e6).row(0))


def linked(run: Path) -> str:
    """Return the part of an edit that describes the link between two pools; "" for one process."""
    if not run.name.endswith(IN_POOLS):
        return ""
    said = json.loads((run / CLIENT).read_text(encoding="utf-8"))
    return f",gbps={said['link_gbps']:.3g},kv={said['kv_bytes']}"


def record(run: Path, setting: dict[str, float], python: str) -> None:
    """Record the server with one setting."""
    words = [word for name, value in setting.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        "-m",
        "dpro",
        "record",
        "--no-windows",
        "--telemetry-period",
        "0",
        "-o",
        str(run),
        "--",
        python,
    ]
    server = POOLS if run.name.rpartition("-")[0].endswith(IN_POOLS) else SERVER
    done = subprocess.run([*command, str(server), *words], stdout=subprocess.PIPE, text=True, check=True)
    ensure_finished(run)
    (run / CLIENT).write_text(done.stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
