"""All measurements of dpro that need a GPU, in one command: the cost of recording, and its accuracy.

python benchmarks/gpu.py [-o FOLDER] [--only STAGE[.CHECK],…] [--limit-s S] [--again] [--json]
python benchmarks/gpu.py --dry-run          the same on a CPU: small sizes, to see that every check runs
python benchmarks/gpu.py --list
python benchmarks/gpu.py --table FOLDER/gpu.json …

Stages are made of checks; each check runs in its own process, under its own time limit, and a check that
fails or is ended does not keep the others from running. All results are in one document, `gpu.json`, which is
written after each check; recorded runs are kept beside it, in archives. A second call with the same folder
runs what is missing. Missing packages that dpro needs are taken from `build/wheels` (`make gpu-wheels`) for
this call; only Python, torch and a GPU have to be there.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # dpro need not be installed

from gpu_stages import facts, facts_nccl, overhead, pairs, ranks, replays, windows  # noqa: E402
from gpu_stages.check import ROOT, Check, write_json  # noqa: E402
from gpu_stages.runner import machine, open_document, run_checks, run_here  # noqa: E402
from gpu_stages.table import rows, summary  # noqa: E402

CHECKS: tuple[Check, ...] = (
    *windows.CHECKS,
    *facts.CHECKS,
    *facts_nccl.CHECKS,
    *overhead.CHECKS,
    *replays.CHECKS,
    *pairs.CHECKS,
    *ranks.CHECKS,
)
WHEELS = ROOT / "build" / "wheels"
NEEDED = ("click", "isal", "itanium_demangler", "msgspec", "numpy", "polars", "pyarrow", "rich")
FOLDER = os.environ.get("OUT") or "build/gpu"
LIMIT_S = 530.0


def chosen(only: str) -> list[Check]:
    """Return the checks of the stages and names in a list, in its order; all for an empty list.

    Raises:
        SystemExit: one of them does not exist.
    """
    found: dict[str, Check] = {}
    for word in only.split(",") if only else dict.fromkeys(check.stage for check in CHECKS):
        fitting = {check.full_name: check for check in CHECKS if _fits(check, word)}
        if not fitting:
            raise SystemExit(f"no stage or check is called {word}: see --list")
        found |= {name: check for name, check in fitting.items() if name not in found}
    return list(found.values())


def _fits(check: Check, word: str) -> bool:
    return check.stage == word or check.full_name == word or check.full_name.startswith(f"{word}.")


def bring_dependencies(work: Path) -> None:
    """Make missing dependencies of dpro importable, from the wheels in `WHEELS`.

    Raises:
        SystemExit: one is missing, and there are no wheels.
    """
    missing = [module for module in NEEDED if importlib.util.find_spec(module) is None]
    if not missing:
        return
    wheels, site = sorted(WHEELS.glob("*.whl")), work / "site"
    if not wheels:
        raise SystemExit(f"missing: {', '.join(missing)}; make gpu-wheels, and bring {WHEELS} along")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--upgrade", "--target", site, *wheels], check=True, timeout=180)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), *([before] if before else [])])


def has_gpu() -> bool:
    """Return whether torch sees a GPU; asked in its own process, which may hang."""
    probe = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    try:
        return subprocess.run([sys.executable, "-c", probe], timeout=120).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(FOLDER), help="for gpu.json and runs; $OUT, else build/gpu"
    )
    parser.add_argument("--only", default="", metavar="STAGE[.CHECK],…")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for the whole call")
    parser.add_argument("--again", action="store_true", help="also what is known already")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU: nothing is measured")
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="render documents, and no more")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the requested checks and print the results; return the exit code."""
    options = parsed()
    checks = chosen(options.check or options.only)
    if options.list:
        for check in checks:
            print(f"{check.full_name:44} {check.limit_s:4.0f} s  {check.asks}")
        return 0
    if options.check:
        return run_here(checks[0], options.results, options.output, options.limit_s, options.dry_run)
    if options.table:
        document = open_document(options.table)
        print(json.dumps(document, indent=1) if options.json else "\n".join(rows(document)))
        return 0
    if not options.dry_run and not has_gpu():
        print("no GPU: torch.cuda.is_available() is false; --dry-run rehearses on the CPU", file=sys.stderr)
        return 2
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    before = [output / "gpu.json"] if (output / "gpu.json").exists() else []
    document = open_document(before)
    if before and document["dry_run"] != options.dry_run:
        raise SystemExit(f"{output}: holds a rehearsal or measurements, which are not put together; see -o")
    if options.again:
        for check in checks:
            document["stages"].get(check.stage, {}).pop(check.name, None)
    document |= {"dry_run": options.dry_run, "machine": document["machine"] | machine()}
    write_json(output / "gpu.json", document)
    report = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with tempfile.TemporaryDirectory(prefix="dpro-gpu-", ignore_cleanup_errors=True) as folder:
        begun, work = time.monotonic(), Path(folder)
        bring_dependencies(work)
        left_s = options.limit_s - (time.monotonic() - begun)
        run_checks(checks, document, output, work, left_s, options.dry_run, report)
    print(json.dumps(document, indent=1) if options.json else "\n".join(rows(document)))
    counts = summary(document)
    print(", ".join(f"{name} {count}" for name, count in counts.items()), file=sys.stderr)
    return int(bool(counts["not_whole"] or (counts["do_not_hold"] and not options.dry_run)))


if __name__ == "__main__":
    sys.exit(main())
