"""Cost of dividing a large run among the workers of a Dask cluster, and bytes on the wire.

python -m benchmarks.speed.cluster [RUN] [--ranks 1024] [--workers 1 2 3] [--json]

Ranks of RUN (default: a sample; traces are imported) are copied, with all of its collectives between all
copies, and condensed: by processes of this machine, one per core, and by clusters of this many workers with
one thread each, here. Loops are compiled before. Chunks of tasks and their results cross the wire, as they
are pickled. `--json` prints one object: check → {n, figures, bar, holds}.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
from distributed import LocalCluster

from benchmarks import REPOSITORY, as_program
from dpro.analysis import graphs
from dpro.extensions.dask import workers
from dpro.opening import open_path
from dpro.schema import TABLES
from dpro.store import Manifest, Run, open_run, write_manifest, write_part

COPIED = ("spans", "collectives", "syncs", "steps", "workers")
SAMPLE = REPOSITORY / "sample_traces" / "slow_rank"


def copied_ranks(source: Run, folder: Path, num_ranks: int) -> Run:
    """Write a run of this many ranks, each a copy of a rank of another run, in that run's collectives."""
    originals = source.manifest.ranks
    members = pl.lit(f"0-{num_ranks - 1}")
    for name in COPIED:
        table = TABLES[name]
        whole = source.table(table)
        of_rank = {rank: whole.filter(pl.col("rank") == rank) for rank in originals}
        for rank in range(num_ranks):
            rows = of_rank[originals[rank % len(originals)]]
            changed = {"rank": pl.lit(rank)} | ({"group_ranks": members} if "group_ranks" in rows else {})
            write_part(folder, table, f"rank{rank:05d}", rows.with_columns(**changed))
    every = list(range(num_ranks))
    write_manifest(folder, Manifest(world_size=num_ranks, ranks=every, created_by=source.manifest.created_by))
    return open_run(folder)


def seconds_to_condense(run: Run, url: str = "") -> tuple[float, bytes]:
    """Time condensing a run; return seconds and the saved file."""
    with tempfile.TemporaryDirectory() as cache:
        shutil.copytree(Path(os.environ["DPRO_CACHE"]) / "loops", Path(cache) / "loops", dirs_exist_ok=True)
        with mock.patch.dict(os.environ, {"DPRO_CACHE": cache, workers.VARIABLE: url}):
            begin = time.perf_counter()
            graphs.condensed_of(run)
            took = time.perf_counter() - begin
            (file,) = Path(cache).glob("graphs/*-ranks.npz")
            return took, file.read_bytes()


def on_the_wire(run: Run, url: str) -> tuple[float, bytes, dict[str, int]]:
    """Condense a run on a cluster; return seconds, the saved file, and bytes per rank sent and received."""
    wire: Counter[str] = Counter()
    whole_map = workers._Workers.map

    def counting(
        self: Any, work: Callable[..., Any], *iterables: Iterable[Any], **options: Any
    ) -> Iterator[Any]:
        tasks, name = list(zip(*iterables)), getattr(work, "func", work).__name__
        wire[f"{name}, there"] += sum(len(pickle.dumps(chunk)) for chunk in self.chunks_of(tasks))
        for result in whole_map(self, work, *zip(*tasks), **options):
            wire[f"{name}, back"] += len(pickle.dumps(result))
            yield result

    with mock.patch.object(workers._Workers, "map", counting):
        took, kept = seconds_to_condense(run, url)
    return took, kept, {what: round(size / len(run.manifest.ranks)) for what, size in sorted(wire.items())}


def measure(source: Path, num_ranks: int, sizes: list[int]) -> dict[str, Any]:
    """Compute the checks of local processes and clusters of these sizes."""
    with tempfile.TemporaryDirectory() as folder:
        original = open_path(source)
        graphs.condensed_of(original)  # compiles loops
        run = copied_ranks(original, Path(folder) / "run", num_ranks)
        here_s, kept = seconds_to_condense(run)
        figures: dict[str, Any] = {
            "spans": run.num_rows(TABLES["spans"]),
            "processes here, s": round(here_s, 1),
        }
        same, wire = True, {}
        for size in sizes:
            with LocalCluster(
                n_workers=size, threads_per_worker=1, dashboard_address="127.0.0.1:0", local_directory=folder
            ) as cluster:
                url = cluster.scheduler_address.replace("tcp:", "dask:")
                took, of_cluster, wire = on_the_wire(run, url)
            figures[f"{size} workers, s"] = round(took, 1)
            same &= of_cluster == kept
    return {
        "condensed by a cluster": {
            "n": num_ranks, "figures": figures, "bar": "what is kept is equal, byte by byte", "holds": same
        },
        "bytes per rank on the wire": {"n": num_ranks, "figures": wire, "bar": None, "holds": True},
    }  # fmt: skip


def main() -> int:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", default=SAMPLE, metavar="RUN")
    parser.add_argument("--ranks", type=int, default=1024, help="how many copies")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3], help="of each cluster")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.run, options.ranks, options.workers)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for check, row in found.items():
            print(f"{check}: n {row['n']}, {row['figures']}, {'holds' if row['holds'] else 'MISSED'}")
    return 0 if all(row["holds"] for row in found.values()) else 1


if __name__ == "__main__":
    as_program(main)
