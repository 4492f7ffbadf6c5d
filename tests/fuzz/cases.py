"""Inputs of the fuzzer, by kind and number: a folder, and the commands that are to read it.

In: a kind, a number, an empty folder. Out: arguments of `dpro`. The same kind and number make the same input,
but for pieces of real traces, which are taken where there are any, and a real recording that was killed.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

from dpro.ingest.formats import FLIGHT_RECORDER, NCCL_RAS
from dpro.ingest.importer import import_sources
from tests.fuzz.bombs import BOMBS
from tests.fuzz.edits import of_an_edit
from tests.fuzz.given import of_a_fabric, of_a_model, of_requests
from tests.fuzz.mutate import by_content, cut, mutated, of_bytes, packed
from tests.fuzz.places import make_odd, of_a_special_file, of_another_user
from tests.fuzz.pool import Commands
from tests.fuzz.removals import of_a_removal
from tests.fuzz.runs import HEALTHY, SLOW_RANK, copied, killed_recording
from tests.fuzz.seeds import SEEDS, format_of
from tests.jobs import ROOT

_PIECE_BYTES = 300_000  # of a real trace


def commands_of(kind: str, number: int, folder: Path) -> Commands:
    """Make an input, and say what is to read it."""
    return KINDS[kind](Random(f"{kind} {number}"), number, folder)


@cache
def _real_pieces() -> tuple[tuple[str, bytes], ...]:
    """Beginnings of real traces, with their names."""
    traces = Path(os.environ.get("DPRO_TRACES", ROOT.parent / "shared" / "traces"))
    found = []
    for path in sorted(traces.rglob("*")) if traces.is_dir() else ():
        if path.is_file() and path.suffix not in (".md", ".log"):
            content = path.read_bytes()
            content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
            if len(content) <= _PIECE_BYTES or content.lstrip()[:1] in (b"{", b"["):
                found.append((path.name.removesuffix(".gz"), content[:_PIECE_BYTES]))
    return tuple(found)


def of_a_format(random: Random, number: int, folder: Path) -> Commands:
    """A file of some format, changed, beside the file of another rank that is as it should be."""
    names = list(SEEDS)
    name = names[number % len(names)]
    content = SEEDS[name](0, random.choice((0, 1, 2, 5, 40)))
    called = random.choice(("rank0", "rank0.json", "_dump_0", "trace"))
    if number % 4 == 3 and (pieces := _real_pieces()):
        called, content = random.choice(pieces)
    content, called = packed(random, mutated(random, content), called)
    for rank, data in (("0", content), ("1", SEEDS[name](1, 5))):
        place = folder / "in" / f"job{rank}" / (called if rank == "0" else "rank1")
        place.parent.mkdir(parents=True)
        place.write_bytes(data)
    run = str(folder / "run")
    commands = [["import", str(folder / "in"), "-o", run, "--jobs", "1"], ["info", run, "--json"]]
    if format_of(name) in (FLIGHT_RECORDER, NCCL_RAS) or number % 20 == 0:
        commands.append(["diagnose", str(folder / "in")])
    if number % 20 == 10:
        commands.append(["report", run])
    return commands


def of_a_run(random: Random, number: int, folder: Path) -> Commands:
    """A run whose manifest or some of whose tables are changed, or missing, or whose path is no text."""
    run = folder / (os.fsdecode(b"run\xff") if number % 50 == 24 else "run")
    if number % 2:
        (folder / "in").mkdir()
        for rank in range(2):
            (folder / "in" / f"rank{rank}").write_bytes(SEEDS["kineto"](rank, 8))
        import_sources([folder / "in"], run, jobs=1)
    else:
        copied(SLOW_RANK, run)
    parts = sorted(run.glob("*/*.parquet"))
    for path in [run / "manifest.json"] if number % 4 < 2 else random.sample(parts, random.choice((1, 1, 3))):
        if number % 10 in (3, 6):
            path.unlink()
            continue
        content = path.read_bytes()
        way = random.choice((by_content(content), by_content(content), of_bytes, cut))
        path.write_bytes(way(random, content))
    commands = [["info", str(run), "--json"], ["report", str(run)]]
    return [*commands, ["diagnose", str(run)]] if number % 8 in (1, 7) else commands


def of_a_recording(random: Random, number: int, folder: Path) -> Commands:
    """A recording that was killed, some of whose files are changed before it is finished."""
    run = copied(killed_recording(folder.parent), folder / "run")
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.suffix != ".parquet")
    for path in random.sample(files, random.choice((1, 1, 2, 5))):
        content = path.read_bytes()
        ways = (by_content(content), of_bytes, cut) if content else (of_bytes,)
        path.write_bytes(random.choice(ways)(random, content))
    return [["info", str(run), "--json"], ["report", str(run)]]


def of_a_topology(random: Random, number: int, folder: Path) -> Commands:
    """Folders with links, loops, pipes, sockets and devices where traces or a run should be."""
    top = folder / "in"
    run = folder / "run"
    if number % 2:
        copied(HEALTHY, top)
        places = [top, *sorted(path for path in top.iterdir() if path.is_dir())]
    else:
        places = [top, top / "a", top / "a" / "b"]
        places[-1].mkdir(parents=True)
        (top / "a" / "rank1").write_bytes(SEEDS["kineto"](1, 3))
    for _ in range(random.choice((1, 3, 6))):
        name = random.choice(
            ("rank0", "rank00000.parquet", "manifest.json", ".raw", ".recording", "spans", "steps")
        )
        place = random.choice(places) / random.choice(
            (name, f"x{random.randrange(99)}", os.fsdecode(b"\xff\n\x1b[2J"))
        )
        if os.path.lexists(place):
            os.rename(place, place.with_name(f"moved{random.randrange(10**6)}"))
        make_odd(random, place, top, top / "a")
    commands = [["info", str(top), "--json"], ["report", str(top)]]
    return [*commands, ["import", str(top), "-o", str(run), "--jobs", "1"]]


def of_a_bomb(random: Random, number: int, folder: Path) -> Commands:
    """A small file that would take all memory, or for ever, beside the file of another rank."""
    for place in ("job0", "job1"):
        (folder / "in" / place).mkdir(parents=True)
    BOMBS[number % len(BOMBS)](random)(folder / "in" / "job0" / "rank0")
    (folder / "in" / "job1" / "rank1").write_bytes(SEEDS["flight recorder (pickle)"](1, 3))
    run = str(folder / "run")
    commands = [["import", str(folder / "in"), "-o", run, "--jobs", "1"], ["info", run, "--json"]]
    return [*commands, ["diagnose", str(folder / "in")]]


KINDS: dict[str, Callable[[Random, int, Path], Commands]] = {
    "format": of_a_format,
    "run": of_a_run,
    "recording": of_a_recording,
    "topology": of_a_topology,
    "bomb": of_a_bomb,
    "model": of_a_model,
    "edit": of_an_edit,
    "requests": of_requests,
    "fabric": of_a_fabric,
    "special": of_a_special_file,
    "others": of_another_user,
    "removal": of_a_removal,
}
