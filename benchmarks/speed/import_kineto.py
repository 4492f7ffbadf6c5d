"""Time from one rank's Kineto file `.json.gz` to Parquet, compared with HolisticTraceAnalysis.

python -m benchmarks.speed.import_kineto [TRACE] [--mb N]… [--rounds N] [--peer-python PATH] [--json]

TRACE is a trace.json.gz; larger files are made from it by repeating its events at later times. Both programs
run in turn, each in a new process that is pinned to one core. Imports are not counted, including numba and
its compiled loops; `process` is a whole process with all of its imports, Python included. CPU time (user and
system) is measured, which a busy machine disturbs less than wall time; compare machines by the ratio of the
medians. The peer reads the file into a data frame and writes nothing; it is skipped where the given
interpreter has no `hta` (0.5.0).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isal import igzip

from benchmarks import as_program

REPOSITORY = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("DPRO_TRACES", REPOSITORY.parent / "shared" / "traces"))
DEFAULT_TRACE = TRACES / "perf" / "h100_owlv2_132k_pystack.json.gz"
MB = 1 << 20

_MEASURED = """
import json, resource, sys
from pathlib import Path
{imports}
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
def peak_mb():  # since the process began; ru_maxrss would remember the parent that it was forked from
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
libraries, begin = peak_mb(), cpu()
{work}
seconds = cpu() - begin
print(json.dumps({{"seconds": seconds, "process": cpu(), "peak_mb": peak_mb(), "libraries_mb": libraries}}))
"""
# polars loads numpy.ma when it first makes a column of an array.
_IMPORTS = (
    "import dpro.ingest.kineto, numpy.ma, pyarrow.parquet\nfrom dpro.ingest.importer import import_sources"
)
_LOOPS = """
from dpro.ingest.kineto.columns import Columns
from dpro.ingest.kineto.columns import Memory
from dpro.ingest.kineto.scanner import Scanner
Scanner(Columns(), Memory())
"""
_WORK = "import_sources([Path(sys.argv[1])], Path(sys.argv[2]))"
_WHOLE = _MEASURED.format(imports=_IMPORTS, work=_WORK)
_OWN = _MEASURED.format(imports=_IMPORTS + _LOOPS, work=_WORK)
_PEER = _MEASURED.format(
    imports=(
        "import logging\nlogging.disable(logging.CRITICAL)\n"
        "from hta.common.trace import parse_trace_file\nfrom hta.configs.parser_config import ParserConfig"
    ),
    work="parse_trace_file(sys.argv[1], ParserConfig.get_default_cfg())",
)
# Parts of an event that differ between copies: time, step, and the ids that join events.
_SHIFTED = re.compile(rb'("(?:ts|correlation|External id)":\s*|"ProfilerStep#)(\d+(?:\.\d+)?)')
_IDS_PER_COPY = 10_000_000
_US_PER_COPY = 100_000_000


def repeated(trace: bytes, size: int) -> Iterator[bytes]:
    """Yield a trace of at least `size` bytes: the events of a trace several times, each time later."""
    begin = re.search(rb'"traceEvents"\s*:\s*\[', trace).end()
    end = json.JSONDecoder().raw_decode(trace.decode("latin-1"), begin - 1)[1] - 1
    yield trace[:begin]
    pieces = _SHIFTED.split(trace[begin:end].rstrip())  # text, key, number, text, …
    keys, numbers = pieces[1::3], pieces[2::3]
    written, copy = 0, 0
    while written < size:
        pieces[2::3] = [_shifted(key, number, copy) for key, number in zip(keys, numbers)]
        text = (b"," if copy else b"") + b"".join(pieces)
        yield text
        written += len(text)
        copy += 1
    yield trace[end:]


def _shifted(key: bytes, number: bytes, copy: int) -> bytes:
    if key.startswith(b'"ts"'):
        whole, point, decimals = number.partition(b".")
        return str(int(whole) + copy * _US_PER_COPY).encode() + point + decimals
    return str(int(number) + copy * (1 if b"Step" in key else _IDS_PER_COPY)).encode()


def write_traces(source: Path, sizes_mb: list[int], folder: Path) -> list[tuple[Path, int]]:
    """Write the trace itself and its enlarged copies; return each path and its uncompressed size in bytes."""
    trace = igzip.decompress(source.read_bytes())
    files = []
    for size_mb in (0, *sizes_mb):
        path = folder / f"{size_mb or len(trace) // MB}mb" / "rank0.json.gz"
        path.parent.mkdir()
        written = 0
        with igzip.open(path, "wb") as file:
            for piece in repeated(trace, size_mb * MB) if size_mb else [trace]:
                written += file.write(piece)
        files.append((path, written))
    return files


def measured(python: str, program: str, *arguments: Path) -> dict[str, float]:
    """Run a program on the first core that this process may use; return the figures that it prints."""
    core = min(os.sched_getaffinity(0))
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [python, "-c", program, *map(str, arguments)],
        check=True,
        capture_output=True,
        env=env,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(path: Path, size: int, rounds: int, peer: str | None) -> dict[str, Any]:
    """Compare both programs on one file, in turn."""
    own, whole, others = [], [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            run = Path(folder) / "run"
            own.append(measured(sys.executable, _OWN, path, run))
            whole.append(measured(sys.executable, _WHOLE, path, Path(folder) / "whole"))
            parquet = sum(part.stat().st_size for part in run.rglob("*.parquet"))
        if peer:
            others.append(measured(peer, _PEER, path))
    seconds = statistics.median(each["seconds"] for each in own)
    row = {
        "mb": round(size / MB),
        "seconds": round(seconds, 3),
        "process": round(statistics.median(each["process"] for each in whole), 3),
        "peak_mb": round(max(each["peak_mb"] for each in own)),
        "libraries_mb": round(own[0]["libraries_mb"]),
        "peak_of_size": round(max(each["peak_mb"] for each in own) * MB / size, 2),
        "parquet_of_size": round(parquet / size, 4),
    }
    if others:
        theirs = statistics.median(each["seconds"] for each in others)
        row |= {"peer_seconds": round(theirs, 2), "ratio": round(theirs / seconds, 1)}
        row["peer_peak_mb"] = round(max(each["peak_mb"] for each in others))
    return row


def peer_or_none(python: str | None) -> str | None:
    """Return the peer's interpreter if the peer is installed there; else None."""
    if (
        python
        and subprocess.run([python, "-c", "import hta"], capture_output=True, check=False).returncode == 0
    ):
        return python
    print("no peer: --peer-python names no interpreter with HolisticTraceAnalysis", file=sys.stderr)
    return None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", nargs="?", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--mb", type=int, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python")
    parser.add_argument("--folder", type=Path, help="where the files are written (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    peer = peer_or_none(options.peer_python)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        files = write_traces(options.trace, options.mb, Path(folder))
        rows = [compare(path, size, options.rounds, peer) for path, size in files]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    as_program(main)
