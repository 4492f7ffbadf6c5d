"""CPU time and memory of healing one rank at a time, per rank, by the number of ranks.

python -m benchmarks.diagnosis.healing [--ranks 64 256 1024 10240] [--whole 1024] [--json]

The jobs are those of `benchmarks/diagnosis/large.py`, of eight steps, with one slow rank, written in one part
per rank as recordings are. `find_stragglers` compares the work of all ranks, and replays the job with each
rank healed that may save enough: in the whole graph, up to as many ranks as `--whole` says, and in condensed
ranks, which other processes build again. Each size runs in its own process. Measured are CPU seconds, and by
how many MB the process grows. Flat means at most 1.25 times as much CPU time per rank as at the best of the
smaller sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.diagnosis.large import SEED
from benchmarks.speed.ranks import FLAT, peak_mb
from dpro.analysis.graphs import context_by_rank, rank_processes
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.stragglers.replayed import find_stragglers
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.by_rank import condense_run
from dpro.schema import TABLES
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from tests.reference.training_jobs import Job, run_job
from tests.reference.training_records import Recording, frames_of

STEPS, WINDOWS, SEVERITY = 8, ((2, 2), (5, 2)), 2.0


@dataclass(frozen=True)
class Figures:
    """Cost of healing in one way.

    Attributes:
        seconds: of CPU time.
        of_ranks: of these, in processes that build ranks.
        grown_mb: by how much the process grew.
        named: ranks that were found slow.
    """

    seconds: float
    of_ranks: float
    grown_mb: float
    named: list[int]


def write_job(folder: Path, num_ranks: int) -> Run:
    """Write the recording of a job, in one part per rank.

    Args:
        folder: the run directory to make.
        num_ranks: of the job.
    """
    job = Job(
        "tp_pp", num_ranks, STEPS, True, "5%", SEED, windows=WINDOWS, fault="compute", severity=SEVERITY,
        victim=num_ranks // 3,
    )  # fmt: skip
    for name, frame in frames_of(job, run_job(job), Recording("compared", seed=SEED)).items():
        for (rank,), rows in frame.partition_by("rank", as_dict=True).items():
            write_part(folder, TABLES[name], f"rank{rank:05d}", rows)
    write_manifest(folder, Manifest(world_size=num_ranks, ranks=list(range(num_ranks))))
    return open_run(folder)


def measured(num_ranks: int, whole: bool) -> dict[str, Figures]:
    """Measure healing in this process, by way.

    Args:
        num_ranks: of the job.
        whole: whether it is healed in the whole graph, too.
    """
    with tempfile.TemporaryDirectory() as place:
        small, run = (write_job(Path(place) / str(size), size) for size in (4, num_ranks))
        find_stragglers(Baseline(build_graph(small).graph))  # loads libraries and compiles loops
        found = {}
        if whole:
            graph = build_graph(run).graph
            found["in the whole graph"] = _figures(lambda: find_stragglers(Baseline(graph)))
        with rank_processes(run) as (executor, folder):
            condensed = condense_run(run, folder, executor)

        def by_rank() -> list[Finding]:
            with context_by_rank(run, condensed) as context:
                return find_stragglers(context.recorded)

        return found | {"in condensed ranks": _figures(by_rank)}


def _figures(heal: Callable[[], list[Finding]]) -> Figures:
    peak_mb()
    own, others, before = time.process_time(), _of_children(), _resident_mb()
    findings = heal()
    own, others = time.process_time() - own, _of_children() - others
    return Figures(
        own + others, others, peak_mb() - before, [rank for each in findings for rank in each.ranks]
    )


def _of_children() -> float:
    """Return CPU seconds of child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 10240])
    parser.add_argument("--whole", type=int, default=1024, help="the most ranks that one graph is made of")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if odd := [size for size in options.ranks if size not in (4, 16) and (size < 32 or size % 32)]:
        parser.error(f"--ranks {odd[0]}: jobs here have 4, 16, or multiples of 32")
    ways: dict[str, list[dict[str, object]]] = {}
    costs: dict[str, list[float]] = {}
    for size in options.ranks:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measured, size, size <= options.whole).result()
        for way, each in found.items():
            of_way = costs.setdefault(way, [])
            of_way.append(1e3 * each.seconds / size)
            facts = {
                "ranks": size, **asdict(each), "ms_per_rank": of_way[-1],
                "kb_per_rank": 1e3 * each.grown_mb / size, "flat": of_way[-1] <= FLAT * min(of_way),
            }  # fmt: skip
            ways.setdefault(way, []).append(facts)
            if not options.json:
                print(f"{size} ranks {way}: {of_way[-1]:.2f} ms and {facts['kb_per_rank']:.0f} kB per rank; "
                      f"{1e3 * each.of_ranks / size:.2f} ms of it in processes that build ranks; "
                      f"slow: {each.named}", flush=True)  # fmt: skip
    if options.json:
        print(json.dumps(ways))


if __name__ == "__main__":
    main()
