"""All answers on every trace, to compare before and after a change that is meant to change none.

python benchmarks/unchanged.py -o BEFORE.json [SOURCE ...]
python benchmarks/unchanged.py -o AFTER.json [SOURCE ...]
python benchmarks/unchanged.py --compare BEFORE.json AFTER.json [--json]

A SOURCE is a run directory or traces; without any, all of the shared traces and the sample runs. Of each, the
replayed nanoseconds are kept as a digest, and the JSON answers of the commands as they are. The comparison
prints every value that differs, by its place, and ends with 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dpro.cli import cli
from dpro.cli.analysis import analyse

REPOSITORY = Path(__file__).resolve().parents[1]
TRACES = Path(os.environ.get("DPRO_TRACES", REPOSITORY.parent / "shared" / "traces"))
CACHE = "DPRO_CACHE"
COMMANDS = ("info", "diagnose", "replay", "whatif", "report")
WHOLE = ("multirank", "flight_recorder", "pp_timeline")  # folders whose subfolders are one job each
NOT_TRACES = {".md", ".log", ".txt"}


def sources() -> Iterator[Path]:
    """Yield all sources: jobs of several ranks as a whole, other traces file by file."""
    yield from sorted(path.parent for path in (REPOSITORY / "sample_traces").glob("*/manifest.json"))
    for folder in sorted(path for path in TRACES.glob("*") if path.is_dir()):
        for path in sorted(folder.iterdir()):
            if path.is_dir() == (folder.name in WHOLE) and path.suffix not in NOT_TRACES:
                yield path


def answers(source: Path) -> dict[str, Any]:
    """Return the digest of the replay, and the answer of each command, or how it ended."""
    found: dict[str, Any] = {"replayed nanoseconds": _digest(source)}
    for command in COMMANDS:
        done = CliRunner().invoke(cli, [command, source.name, "--json"])
        try:
            found[command] = json.loads(done.stdout.replace(os.environ[CACHE], CACHE))
        except ValueError:
            found[command] = {"exit code": done.exit_code, "error": str(done.exception)}
    return found


def _digest(source: Path) -> str:
    try:
        timeline = analyse(source.name).timeline
    except Exception as error:  # a failure to replay is an answer, too
        return f"{type(error).__name__}: {error}"
    return hashlib.sha256(timeline.start.tobytes() + timeline.end.tobytes()).hexdigest()


def differences(before: Any, after: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each value that differs: its place, before, and after."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(before.get(key), after.get(key), f"{place}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after)):
            yield from differences(old, new, f"{place}[{number}]")
    elif before != after:
        yield place, before, after


def _compare(paths: list[Path], as_json: bool) -> int:
    before, after = (json.loads(path.read_text()) for path in paths)
    found = list(differences(before, after))
    if as_json:
        checks = {
            "answers that differ": {"n": len(before), "differ": len(found), "bar": 0, "holds": not found}
        }
        print(json.dumps(checks))
    else:
        for place, old, new in found:
            print(f"{place}: {json.dumps(old)} -> {json.dumps(new)}")
        print(f"{len(found)} values differ in the answers to {len(before)} sources")
    return int(bool(found))


def main() -> int:
    """Gather answers, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sources", nargs="*", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="where to write what was found")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--json", action="store_true", help="the comparison as one object")
    options = parser.parse_args()
    if options.compare:
        for path in options.compare:
            if not path.is_file():
                parser.error(f"{path}: no such file; -o FILE makes one")
        return _compare(options.compare, options.json)
    if options.output is None:
        parser.error("-o FILE says where to write what was found")
    output = options.output.resolve()
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["DPRO_HISTORY"] = "off"  # so that history, too, has no effect
        os.environ[CACHE] = cache  # an older dpro's cache must not answer for this one
        for source in [path.resolve() for path in options.sources or sources()]:
            print(source, file=sys.stderr)
            os.chdir(source.parent)  # the answers name the source as it was given
            found[f"{source.parent.name}/{source.name}"] = answers(source)
    output.write_text(json.dumps(found, indent=1, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
