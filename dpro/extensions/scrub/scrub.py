"""Writes an anonymised copy of a run that gives the same answers.

Takes a run; writes a run in which hosts, addresses, paths, commands, modules and other names chosen by the
job have new names: consistent, and in the same sort order. Operators and kernels keep their names, which dpro
classifies them by; times, sizes, versions, settings of libraries and hardware ids also stay.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import polars as pl
from msgspec.structs import replace as structs_replace

from dpro.detect.findings_log import FILE, FOLDER
from dpro.documents import Document
from dpro.errors import UsageError
from dpro.folders import made_whole
from dpro.recorders import RECORDER_FRAMES
from dpro.replay.mesh import DESCRIBED
from dpro.replay.pipeline.operations import LAYERS_FLAGS
from dpro.schema import SPANS, TABLES, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.words import from_json

ATTEMPTS = "attempts"  # the folder of earlier attempts in a run
LEFT_OUT = "what hangs left in findings/, logs of commands, the fabric's description"
HOSTS = {"workers": ["host"], "counters": ["host"]}
# Columns with names chosen by the job; and below, columns with dpro's texts, which may quote such names.
JOB_NAMED_COLUMNS = {
    "buckets": ["names"], "codecs": ["names"], "sensitivities": ["module"], "model_calls": ["name"],
    "checkpoints": ["path"], "out_of_memory": ["module", "calls", "names"], "requests": ["name"],
    "workers": ["error", "role"], "start_parts": ["name", "purpose"],
    "collectives": ["group"], "process_groups": ["group"], "sends": ["group"],
}  # fmt: skip
MIXED = {"counters": ["device"]}
NAMED_BY_JOB = ("annotation", "gpu_annotation", "python")  # kinds of spans
# Complete span names of PyTorch or dpro, since a job may begin its own names with any of them; and
# `FRAMEWORK_PREFIX`, the prefixes of names that continue with one of the job's.
_COLLECTIVE = (
    r"(?:all|reduce|gather|scatter|broadcast|send|recv|barrier|to|into|from|any|source|anysource|tensor|base|out"
    r"|coalesced|sparse|group|allreduce|allgather|alltoall)"
)
FRAMEWORK_SPAN = re.compile(
    r"ProfilerStep#\d+|dpro::(?:backward|step|iteration)|DistributedDataParallel\.forward"
    rf"|(?:nccl|gloo|mpi|ucc):_?{_COLLECTIVE}(?:_{_COLLECTIVE})*(?: \d+(?:->|<-)\d+)?"
    r"|PP:\d+[FBIW]\d+|PP:\(\d+F\d+;\d+[BI]\d+\)OVERLAP_F_B|(?:Forward|Backward) \d+"
    r"|Torch-Compiled Region(?:: \d+/\d+)?|## Call CompiledFxGraph [0-9a-z]+ ##"
    rf"|(?:torch/|{RECORDER_FRAMES})[\w/]+\.py\(\d+\): [\w<>.]+"
)
FRAMEWORK_PREFIX = re.compile(
    r"(?:Optimizer\.(?:step|zero_grad)#|nn\.Module: |enumerate\(DataLoader\)#|FSDP::\w+"
    r"|<built-in (?:function|method) )"
)
GIVEN_SETTING = re.compile(r"NCCL_|RCCL_|TORCH_|PYTORCH_|OMP_|CUDA_|HIP_|GLOO_|KINETO_")
WORD = r"[^\W\d]\w*"
# In dpro's texts: a command after a colon, or a path, with the line and function.
PATH = r"(?<=: )/\S.*$|(?:(?:/[\w.@+-]+){2,}|[\w./@+-]+\.py\b)(?::\d+ [\w.<>]+)?"
ADDRESS = r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F:]*)(?![\w.])"
OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
KEPT_WORDS = {
    *dir(builtins), *OPTIMIZERS, *DESCRIBED, "default_pg", "step", "zero_grad", "weight", "bias", "module",
    "forward", "backward", "python", "py", "torchrun", "of", "at", "__next__", "_SingleProcessDataLoaderIter",
    "_MultiProcessingDataLoaderIter", "torch", "undefined",
}  # fmt: skip


class ScrubDocument(Document, frozen=True, kw_only=True):
    """A copy of a run.

    Attributes:
        run: the run as the user named it.
        copy: path of the copy.
        hosts: number of renamed hosts.
        addresses: number of renamed addresses.
        names: number of renamed words in paths, modules and commands.
        left_out: what was not copied.
    """

    run: str
    copy: str
    hosts: int
    addresses: int
    names: int
    left_out: str


@dataclass
class NewNames:
    """New names by old ones; before `settle`, each name seen maps to itself."""

    hosts: dict[str, str]
    addresses: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compile the patterns of names."""
        hosts = "|".join(map(re.escape, sorted(self.hosts, key=len, reverse=True)))
        host = rf"(?P<host>(?<!\w)(?:{hosts})(?!\w))|" if hosts else "(?P<host>(?!))|"
        self._in_own = re.compile(f"{host}(?P<address>{ADDRESS})|(?P<word>{WORD})")
        self._in_ours = re.compile(f"(?P<path>{PATH})|{self._in_own.pattern}")

    def whole(self, text: str) -> str:
        """Rename all words of a text by the job, except those of Python and PyTorch."""
        return self._in_own.sub(lambda match: self._new(match, self.words.setdefault), text)

    def mixed(self, text: str) -> str:
        """Rename paths, and known names, in a text by dpro."""
        return self._in_ours.sub(lambda match: self._new(match, self.words.get), text)

    def settle(self) -> None:
        """Assign new names to all names seen, in the sort order of the old ones."""
        hosts, addresses, words = (sorted(names) for names in (self.hosts, self.addresses, self.words))
        self.hosts = {host: f"host{_numbered(number, hosts)}" for number, host in enumerate(hosts)}
        self.words = {word: f"x{_numbered(number, words)}" for number, word in enumerate(words)}
        self.addresses = {
            address: f"2001:db8::{number:x}" if ":" in address else str(ip_address("198.18.0.1") + number)
            for number, address in enumerate(addresses)
        }

    def of_span(self, kind: str, name: str) -> str:
        """Return the new name of a span."""
        if kind not in NAMED_BY_JOB or FRAMEWORK_SPAN.fullmatch(name):
            return name
        before = FRAMEWORK_PREFIX.match(name)
        given = before[0] if before else ""
        return given + self.whole(name.removeprefix(given))

    def of_host(self, host: str) -> str:
        """Return the new name of a host; empty for none."""
        return self.hosts.get(host, host)

    def of_part(self, part: str) -> str:
        """Return the new name of a part of a table, which may contain the host's."""
        return self._in_own.sub(
            lambda match: self.hosts[match[0]] if match.lastgroup == "host" else match[0], part
        )

    def of_stack(self, stack: str) -> str:
        """Rename the lines of a stack, except those within PyTorch."""
        lines = stack.splitlines()
        return "\n".join(line if line.startswith("torch/") else self.whole(line) for line in lines)

    def _new(self, match: re.Match[str], renamed: Callable[[str, str], str]) -> str:
        old = match[0]
        if match.lastgroup == "path":
            return self.whole(old)
        if match.lastgroup == "host":
            return self.hosts[old]
        if match.lastgroup == "word":
            return old if old in KEPT_WORDS else renamed(old, old)
        try:
            is_loopback = ip_address(old).is_loopback
        except ValueError:
            return old
        return old if is_loopback else self.addresses.setdefault(old, old)


def _numbered(number: int, names: list[str]) -> str:
    """Return a number padded to the digits of the largest, so that new names sort like the old ones."""
    return f"{number:0{len(str(len(names)))}}"


def scrub(run: Run, copy: Path) -> NewNames:
    """Write an anonymised copy of a run.

    Raises:
        UsageError: the path is not empty, or cannot be written; then no part of the copy is left.
    """
    if copy.exists() and (not copy.is_dir() or any(copy.iterdir())):
        raise UsageError(f"{copy}: exists and is not empty; name another folder, or remove it")
    runs = {Path(): run}
    for manifest in sorted(run.path.glob(f"{ATTEMPTS}/*/manifest.json")):
        runs[manifest.parent.relative_to(run.path)] = open_run(manifest.parent)
    names = NewNames({host: host for source in runs.values() for host in _hosts(source)})
    for source in runs.values():  # first pass: collect all names
        for _ in _renamed_parts(source, names):
            pass
        _renamed_manifest(source.manifest, names)
        _renamed_log(source, names)
    names.settle()
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with made_whole(copy) as made:
            for place, source in runs.items():
                _write_renamed(made / place, source, names)
    except OSError as error:
        raise UsageError(f"{copy}: cannot be written ({error.strerror or error})") from error
    return names


def _write_renamed(folder: Path, source: Run, names: NewNames) -> None:
    for table, part, rows in _renamed_parts(source, names):
        write_part(folder, TABLES[table], names.of_part(part), rows)
    if text := _renamed_log(source, names):
        (folder / FOLDER).mkdir(parents=True)
        (folder / FOLDER / FILE).write_text(text)
    write_manifest(folder, _renamed_manifest(source.manifest, names))


def _hosts(run: Run) -> set[str]:
    """Return the names of hosts, with and without domains."""
    workers = run.table(WORKERS, ["host"])["host"]
    sampled = [rows["host"] for rows in run.part_by_part(TABLES["counters"], ["host"])]
    hosts = {*run.manifest.hosts, *workers, *(host for part in sampled for host in part.unique())} - {""}
    return hosts | {host.partition(".")[0] for host in hosts if host[0].isalpha()}


def _renamed_parts(run: Run, names: NewNames) -> Iterator[tuple[str, str, pl.DataFrame]]:
    """Yield the table, part name and renamed rows of each part."""
    for table in TABLES.values():
        for part in run.parts(table):
            rows = run.read(table, [part], list(table.columns))
            ways: list[tuple[str, Callable[[str], str]]] = [
                *((column, names.of_host) for column in HOSTS.get(table.name, ())),
                *((column, names.mixed) for column in MIXED.get(table.name, ())),
                *((column, names.whole) for column in JOB_NAMED_COLUMNS.get(table.name, ())),
            ]
            if table is WORKERS:
                ways.append(("stack", names.of_stack))
            for column, way in ways:
                rows = rows.with_columns(_mapped(rows[column], way))
            if table is SPANS:
                rows = _renamed_spans(rows, names)
            yield table.name, part.stem, rows


def _mapped(values: pl.Series, way: Callable[[str], str]) -> pl.Series:
    """Apply a function once to each distinct text of a column, also in lists."""
    is_list = isinstance(values.dtype, pl.List)
    texts = (values.explode() if is_list else values).drop_nulls().unique().to_list()
    new = {text: way(text) for text in texts}
    if not is_list:
        return values.replace(new)
    return values.list.eval(pl.element().replace(new)) if new else values


def _renamed_spans(rows: pl.DataFrame, names: NewNames) -> pl.DataFrame:
    distinct = rows.select("kind", "name").unique().filter(pl.col("kind").is_in(NAMED_BY_JOB))
    new = distinct.with_columns(
        new=pl.Series([names.of_span(kind, name) for kind, name in distinct.iter_rows()], dtype=pl.String)
    )
    joined = rows.join(new, on=["kind", "name"], how="left", maintain_order="left")
    return joined.with_columns(name=pl.coalesce("new", "name")).drop("new")


def _renamed_log(run: Run, names: NewNames) -> str:
    """Return the log of findings made during the job, renamed; empty for none."""
    log = run.path / FOLDER / FILE
    lines = log.read_text().splitlines() if log.is_file() else []
    return "".join(f"{json.dumps(_deep(from_json(line), names.mixed))}\n" for line in lines if line.strip())


def _renamed_manifest(manifest: Manifest, names: NewNames) -> Manifest:
    environment = {
        name: (names.mixed if GIVEN_SETTING.match(name) else names.whole)(value)
        for name, value in manifest.environment.items()
    }
    return replace(
        manifest,
        command=[word if word in LAYERS_FLAGS else names.whole(word) for word in manifest.command],
        hosts=list(map(names.of_host, manifest.hosts)),
        environment=environment,
        options={
            name: _deep(value, names.whole if name in ("requests", "step", "nccl_inspector") else names.mixed)
            for name, value in manifest.options.items()
        },
        error=names.whole(manifest.error),
        unrecorded=names.mixed(manifest.unrecorded),
        warnings=[names.mixed(line) for line in manifest.warnings],
        skipped={names.mixed(reason): number for reason, number in manifest.skipped.items()},
        sources=_deep(manifest.sources, names.mixed),
        applied=[
            structs_replace(
                change,
                applied=[
                    structs_replace(
                        place, where=names.whole(place.where), instead_of=names.whole(place.instead_of)
                    )
                    for place in change.applied
                ],
                refused=[names.mixed(reason) for reason in change.refused],
            )
            for change in manifest.applied
        ],
    )


def _deep(value: Any, way: Callable[[str], str]) -> Any:
    """Apply a function to all texts in a JSON value, except keys."""
    if isinstance(value, str):
        return way(value)
    if isinstance(value, Mapping):
        return {key: _deep(part, way) for key, part in value.items()}
    if isinstance(value, Iterable):
        return [_deep(part, way) for part in value]
    return value
