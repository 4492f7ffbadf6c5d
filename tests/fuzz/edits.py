"""Edits that are nearly right: of jobs, of servers and of how jobs recover; some name files that are not.

In: a random generator, a number, an empty folder. Out: arguments of `dpro`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

from dpro.extensions.goodput.outlook import DESIGNS
from dpro.extensions.serving.changes import CHANGES
from dpro.replay.whatif.registry import FAMILIES, all_kinds
from tests.fuzz.given import CONFIGURATIONS, FABRICS, LOGS, changed, text_changed
from tests.fuzz.mutate import ODD_NUMBERS, mutated
from tests.fuzz.places import make_odd
from tests.fuzz.pool import Commands
from tests.fuzz.runs import SLOW_RANK, copied, in_a_fabric, in_a_pipeline, on_cpus, on_gpus, served

EXAMPLES = (
    *(("whatif", kind.example) for kind in all_kinds()),
    *(("serving", change.example) for change in CHANGES.values()),
    *(("goodput", change.example) for change in DESIGNS.values()),
)


class _Named(NamedTuple):
    """A command that reads a file: its run, the words with {} for the file, what may be in that."""

    command: str
    run: Callable[[Path], Path]
    words: str
    contents: tuple[bytes, ...]


_CURVES = (
    b"op,bytes,num_ranks,time_us\nall_reduce,1024,2,30\nall_reduce,65536,2,90\nall_reduce,1048576,2,300\n"
)
_FAILURES = b"time,host\n" + b"".join(b"2026-01-0%dT00:00:00,node%d\n" % (at, at) for at in range(1, 8))
NAMED = (
    _Named("whatif", in_a_fabric, "--edit paths:file={}", FABRICS["paths"]),
    _Named("whatif", in_a_fabric, "--edit beside:run={}", ()),
    _Named("serving", served, "--edit requests:file={}", tuple(log(3) for log in LOGS)),
    _Named("whatif", in_a_fabric, "--edit network:bandwidth=2 --network-table {}", (_CURVES,)),
    _Named("goodput", lambda _: SLOW_RANK, "--failures {}", (_FAILURES,)),
    _Named("whatif", on_gpus, "--edit device:to=H200 --device-table {}", (_CURVES,)),
)


def of_an_edit(random: Random, number: int, folder: Path) -> Commands:
    """An edit whose text is changed, alone or with another of its kind; or one that names a file."""
    if number % 5 == 4:
        return [_with_a_file(random, NAMED[number // 5 % len(NAMED)], folder)]
    command, example = EXAMPLES[number % len(EXAMPLES)]
    texts = [_edit_changed(random, example)]
    if random.random() < 0.2:
        texts.append(random.choice([text for name, text in EXAMPLES if name == command]))
        random.shuffle(texts)
    edits = [word for text in texts for word in ("--edit", text)]
    return [[command, *_asked(command, example, random, folder), *edits, *random.choice(([], ["--json"]))]]


def _edit_changed(random: Random, example: str) -> str:
    """An edit some of whose values are others, or are left out; or whose text is changed somewhere."""
    name, _, rest = example.partition(":")
    pairs = rest.split(",")
    if random.random() < 0.25 or not rest:
        return text_changed(random, example)
    for at in random.sample(range(len(pairs)), min(len(pairs), random.choice((1, 1, 2)))):
        key, _, value = pairs[at].partition("=")
        odd = random.choice((random.choice(ODD_NUMBERS).decode(), text_changed(random, value)))
        pairs[at] = f"{key}={odd}" if random.random() < 0.9 else ""
    return f"{name}:{','.join(filter(None, pairs))}"


def _asked(command: str, example: str, random: Random, folder: Path) -> list[str]:
    """The run that a command is to answer for, with what else it needs to know."""
    if command == "serving":
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIGURATIONS[0]))
        known = ["--model", str(config), "--device", "H100"]
        return [str(served(folder.parent)), *random.choice(([], known))]
    if command == "goodput":
        return [str(SLOW_RANK), "--hours", "24", "--preset", "llama-3"]
    runs = [on_cpus, on_gpus, in_a_pipeline, in_a_fabric]
    family = next(family for family, names in FAMILIES.items() if example.partition(":")[0] in names)
    runs += {"Fabric": 9 * [in_a_fabric], "Parallelism": 3 * [in_a_pipeline]}.get(family, [])
    return [str(random.choice(runs)(folder.parent))]


def _with_a_file(random: Random, asked: _Named, folder: Path) -> list[str]:
    """A command that names a file or folder, in the place of which is something else."""
    place, run = folder / "named", asked.run(folder.parent)
    if random.random() < 0.4:
        make_odd(random, place)
    elif asked.contents:
        place.write_bytes(changed(random, random.choice(asked.contents)))
    else:
        parts = [path for path in sorted(copied(run, place).rglob("*")) if path.is_file()]
        part = random.choice(parts)
        part.write_bytes(mutated(random, part.read_bytes()))
    return [asked.command, str(run), *(word.format(place) for word in asked.words.split())]
