"""Places that are not what they should be: pipes, devices, sockets, links; runs and caches of other users.

In: a random generator, a number, an empty folder. Out: arguments of `dpro`. Only root can give files to
another user; any other can only let all write to them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from random import Random

from tests.fuzz.pool import Commands
from tests.fuzz.runs import HEALTHY, SLOW_RANK, copied, in_a_fabric, killed_recording, served
from tests.fuzz.seeds import SEEDS

OTHER_USERS = (65534, 12345)
ENDING = b"cposix\n_exit\n(I97\ntR."  # a pickle that ends the process which loads it, with a code of its own
DEVICES = ("/dev/zero", "/dev/zero", "/dev/tty", "/dev/full", "/dev/null", "/proc/self/mem", "/proc/self/fd")

# Commands: {} is an odd place, {good} and {served} are runs, {traces} a folder of traces, {made} nothing yet.
NAMING = """
info {}
report {}
diagnose {}
replay {}
goodput {}
serving {}
plan {} --gpus 8
diff {} {good}
diff {good} {}
import {} -o {made}
import {traces} {} -o {made}
import {traces} -o {}
import --requests {} -o {made}
export {} --chrome {made}
export {good} --chrome {}
export {good} --perfetto {}
report {good} --html {}
whatif {} --edit network:bandwidth=2
whatif {good} --edit network:bandwidth=2 --network-table {}
whatif {good} --edit device:to=H200 --device-table {}
goodput {good} --failures {}
plan --model {} --gpus 8
serving {served} --edit device:name=H200 --device H100 --model {}
topology {}
topology {} --attach {good}
topology --slurm {} --gbit 4
topology --ibnetdiscover {}
topology --fat-tree 4 --inside {}
topology --fat-tree 4 --attach {}
topology --fat-tree 4 -o {}
topology {good} --paths {}
topology {good} --nccl-log {}
topology {good} --plan {}
topology {good} --plan {made} --probes {}
""".strip().splitlines()
# Of a run, beside parts of its tables.
REPLACED = (
    *("manifest.json", "topology.toml", "paths.json", "channels.json", ".recording", ".raw", "attempts"),
    *("spans", "steps", "collectives", "spans/rank00009.parquet", "counters/x.parquet", "requests"),
)


def make_odd(random: Random, place: Path, *targets: Path | str) -> None:
    """Put something at a place that is no file, or none that can be read.

    Args:
        targets: of links, beside devices.
    """
    way = random.randrange(7)
    if way < 3:
        place.symlink_to(random.choice((*DEVICES, "nowhere", place, place.parent, *targets)))
    elif way == 3:
        os.mkfifo(place)
    elif way == 4:
        here = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
        with socket.socket(socket.AF_UNIX) as bound:  # whose own names are short
            bound.bind(f"/proc/self/fd/{here}/".encode() + os.fsencode(place.name))
        os.close(here)
    elif way == 5:
        (place / "x.parquet").mkdir(parents=True)
    else:
        place.write_bytes(random.choice((b"", b"x")))
        place.chmod(0)


def of_a_special_file(random: Random, number: int, folder: Path) -> Commands:
    """Something that is no file as what a command is given, or in a run, or among traces."""
    good = copied(in_a_fabric(folder.parent) if number % 3 else HEALTHY, folder / "good")
    traces = _traces(folder / "traces")
    names = {"good": good, "traces": traces, "served": served(folder.parent), "made": folder / "made"}
    if number % 3:
        odd = folder / random.choice(("odd", "x.parquet", "odd.json", "odd.toml", "odd.csv"))
        make_odd(random, odd, traces)
        words = NAMING[(number // 3 * 2 + number % 3) % len(NAMING)].split()
        return [[word.format(odd, **names) for word in words]]
    parts = [str(path.relative_to(good)) for path in sorted(good.glob("*/*.parquet"))]
    for name in random.sample((*REPLACED, *parts), random.choice((1, 1, 2))):
        place, moved = good / name, folder / f"moved-{name.replace('/', '-')}"
        if place.parent.is_dir() and not place.parent.is_symlink():
            if place.exists():
                place.rename(moved)
            make_odd(random, place, moved)
    make_odd(random, traces / random.choice(("rank1", "a.json", "b.parquet")), good)
    run, given = str(good), random.choice((good, traces))
    asked = random.choice((["report", run], ["topology", run], ["diagnose", run], ["goodput", run]))
    return [["info", run, "--json"], asked, ["import", str(given), "-o", str(folder / "made")]]


def _traces(folder: Path) -> Path:
    """Traces of one rank, in a folder."""
    folder.mkdir()
    (folder / "rank0").write_bytes(SEEDS["kineto"](0, 3))
    return folder


def of_another_user(random: Random, number: int, folder: Path) -> Commands:
    """A run, a recording or a cache of another user, or one to which others may write."""
    return (_run_of_another, _recording_of_another, _cache_of_another)[number % 3](random, folder)


def _give(random: Random, paths: Iterable[Path]) -> None:
    """Give files and folders to another user, or let all users write to them."""
    user = random.choice(OTHER_USERS)
    for path in paths:
        if os.geteuid() == 0 and random.random() < 0.8:
            os.chown(path, user, user, follow_symlinks=False)
        if random.random() < 0.4 and not path.is_symlink():
            path.chmod(random.choice((0o777, 0o1777, 0o666, 0o700, 0)))


def _some(random: Random, run: Path) -> list[Path]:
    """A run, or what is in it, or a part of that."""
    every = [run, *sorted(run.rglob("*"))]
    return random.choice((every, [run], every[1:], random.sample(every, min(len(every), 3))))


def _run_of_another(random: Random, folder: Path) -> Commands:
    run = copied(random.choice((HEALTHY, SLOW_RANK)), folder / "run")
    _give(random, _some(random, run))
    asked = (
        *(["report", str(run)], ["diagnose", str(run)], ["goodput", str(run)], ["topology", str(run)]),
        *(["whatif", str(run), "--edit", "slow:rank=1,factor=2"], ["replay", str(run)]),
        *(["topology", "--fat-tree", "2", "--attach", str(run)], ["import", str(run), "-o", str(run)]),
        ["import", str(_traces(folder / "traces")), "-o", str(run / "made")],
    )
    return [["info", str(run), "--json"], *random.sample(asked, 2)]


def _recording_of_another(random: Random, folder: Path) -> Commands:
    run = copied(killed_recording(folder.parent), folder / "run")
    hidden = [run / ".raw", run / ".recording"]
    within = [path for place in hidden for path in (place, *sorted(place.rglob("*")))]
    _give(random, random.choice((within, hidden, hidden[:1], hidden[1:], [run], random.sample(within, 2))))
    return [["info", str(run), "--json"], ["report", str(run)]]


def _cache_of_another(random: Random, folder: Path) -> Commands:
    """A cache whose machine code ends the process that loads it, and is another user's or open to others."""
    cache = folder / "cache"
    for kept in ("loops", "imports", "graphs"):
        (cache / kept).mkdir(parents=True, mode=0o700)
    code = [cache / "loops" / name for name in _names_of_loops(folder.parent)]
    for file in code:
        file.write_bytes(ENDING)
    as_root = os.geteuid() == 0
    theirs = random.choice(([cache], [cache / "loops"], code)) if as_root else code
    for path in theirs:
        if as_root and (path.is_dir() or random.random() < 0.5):
            os.chown(path, random.choice(OTHER_USERS), -1)
        else:
            path.chmod(random.choice((0o666, 0o620, 0o602)))
    _give(random, random.sample([cache / "imports", cache / "graphs"], random.randrange(3)))
    return [["report", str(copied(HEALTHY, folder / "run"))], ["info", str(_traces(folder / "traces"))]]


def _names_of_loops(folder: Path) -> list[str]:
    """What machine code is called that commands have kept: those before, or those of the user."""
    usual = os.environ.get("DPRO_CACHE", Path.home() / ".cache" / "dpro")
    found = [each for cache in (folder / "cache", Path(usual)) for each in (cache / "loops").glob("*.nb[ic]")]
    return sorted({path.name for path in found})
