"""Reads profiles that XLA's profiler writes (`*.xplane.pb`), each of one process, into tables.

Reads the file that JAX, TensorFlow or PyTorch/XLA wrote, gzipped or not; returns one `RankTrace`, with times
on the wall clock if the profile has its start time. Of lines that summarise others it reads only steps and
modules. Does not read counters, sources or the programs.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl

from dpro.errors import InputError, MissingExtra
from dpro.extensions.nsys.tables import find_steps, read_collectives, read_syncs
from dpro.ingest.impossible import drop_impossible, impossible_in_words
from dpro.ingest.reading.files import rank_of_name, read_bytes
from dpro.ingest.reading.symbols import demangled
from dpro.ingest.trace import RankTrace, of_rank
from dpro.recorders import XLA
from dpro.schema import GPU_WORK_KINDS

SOURCE = "XPlane"
_INT64 = (1 << 63) - 1

# The messages of the format that are read: each field's name, number and type; `*` marks repeated fields.
# Large messages are declared as bytes, so that they are parsed one at a time.
_MESSAGES = {
    "Space": "planes 1 *bytes, hostnames 4 *bytes",
    "Plane": "name 2 bytes, lines 3 *bytes, event_names 4 *Entry, stat_names 5 *Entry, stats 6 *Stat",
    "Entry": "key 1 int64, value 2 Named",
    "Named": "name 2 bytes",
    "Line": "id 1 int64, name 2 bytes, start_ns 3 int64, events 4 *Event",
    "Event": "name 1 int64, offset_ps 2 int64, duration_ps 3 int64, stats 4 *Stat, occurrences 5 int64",
    "Stat": "name 1 int64, unsigned 3 uint64, signed 4 int64, text 5 bytes, reference 7 uint64",
}
_DEVICE = re.compile(r"^/device:(?!CUSTOM)\w+:(\d+)$")
_STREAM = re.compile(r"^Stream #(-?\d+)")
# Lines of a TPU. Its operations are stream 0; asynchronous work gets as many more streams as it overlaps.
_OPS, _ASYNC, _MODULES, _STEPS = "XLA Ops", "Async XLA Ops", "XLA Modules", "Steps"
_EVENT = {"name": pl.Int64, "begin": pl.Int64, "took": pl.Int64}
_FACTS = {"correlation_id": pl.Int64, "step_num": pl.Int64, "step_name": pl.String}
_FACTS |= {"memcpy_details": pl.String, "memset_details": pl.String}
_NO_SYNCS = pl.DataFrame(
    schema=dict.fromkeys(
        ("process", "correlation", "device", "stream", "event_id", "start_ns", "duration_ns"), pl.Int64
    )
)
_INSTANTS, _SUMS = "instants", "events of lines that sum up others"
_HLO = r"(?s)^%?([\w.-]+) = .*$"  # the text of an instruction begins with its name
_ENDS = r"-(start|done)(\.\d+)*$"
_COPY = r"(?i)^memcpy|^copy(-start|-done)?(\.\d+)*$"
# The first plane, its number unless 0, and its name.
_PLANE = rb"(?s)\n[\x80-\xff]{0,9}[\0-\x7f](?:\x08[\x80-\xff]{0,9}[\0-\x7f])?\x12([\x01-\x7f])"


def is_xspace(head: bytes) -> bool:
    """Return whether a file begins with a plane whose name is readable."""
    match = re.match(_PLANE, head)
    name = head[match.end() : match.end() + match[1][0]] if match else b"\0"
    return name.isascii() and name.decode().isprintable()


def read_xspace(path: Path, *, rank: int | None = None) -> RankTrace:
    """Read the process of a file.

    Args:
        path: the file; its name gives the rank.
        rank: the rank, overriding the file name.

    Raises:
        InputError: the file is damaged, or no device worked during the recording.
        MissingExtra: the library that reads protocol buffers is not installed.
    """
    profile = _read(path)
    number = rank_of_name(path.name) if rank is None else rank
    events = pl.concat(profile.parts).with_columns(
        pl.col("start_ns") + profile.began_ns,
        pl.col(pl.String).fill_null(""),
        pl.lit(-1, pl.Int64).alias("sequence_number"),
        pl.lit(-1, pl.Int64).alias("forward_thread"),
        pid=pl.when(pl.col("tid") >= 0).then(profile.pid).otherwise(-1).cast(pl.Int64),
        window=pl.lit(0),
        domain=pl.lit(""),
        payload=pl.lit(""),
    )
    events = events.sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
    marks = events.filter(pl.col("line") == _STEPS)
    spans, impossible = drop_impossible(_without_waits(events.filter(pl.col("line") != _STEPS)))
    spans = spans.with_row_index("span_id").with_columns(pl.col("span_id").cast(pl.Int64))
    devices = spans.filter(pl.col("kind").is_in(GPU_WORK_KINDS))["device"].n_unique()
    if not devices:
        raise InputError(f"{path}: no work of a GPU or TPU in it; record it around steps that run there")
    ends = spans["start_ns"] + spans["duration_ns"]
    worker = {"host": profile.host, "pid": profile.pid, "gpu_name": "".join(profile.gpus[:1])}
    worker |= {"started_ns": spans["start_ns"].min(), "ended_ns": ends.max(), "source": SOURCE}
    frames = {
        "spans": spans.drop("domain", "payload", "line", *_FACTS),
        "collectives": read_collectives(spans).with_columns(source=pl.lit(f"{SOURCE} kernel")),
        "syncs": read_syncs(spans, _NO_SYNCS, _NO_SYNCS.drop("start_ns", "duration_ns")),
        "steps": _steps(spans, marks).with_columns(window=pl.lit(0)),
        "workers": pl.DataFrame([worker]),
    }
    one = f"{path.name}: {devices} devices of one process are one rank, and not compared with each other"
    return RankTrace(
        rank=number,
        world_size=-1,
        frames={name: of_rank(frame, number) for name, frame in frames.items()},
        host=profile.host,
        gpus=profile.gpus,
        versions=profile.versions,
        skipped=dict(sorted((impossible + profile.skipped).items())),
        warnings=[*impossible_in_words(path.name, impossible), *([one] if devices > 1 else [])],
    )


def _without_waits(events: pl.DataFrame) -> pl.DataFrame:
    """Turn the ends of asynchronous operations on a TPU into waits, if their full spans are recorded, too."""
    operation = pl.col("name").str.replace(_ENDS, "").str.replace(r"(\.\d+)*$", "")
    of_device = pl.struct("device", operation)
    beside = events.filter(pl.col("line") == _ASYNC).select(of_device).to_series().unique()
    is_end = (pl.col("line") == _OPS) & pl.col("name").str.contains(_ENDS) & of_device.is_in(beside.implode())
    return events.with_columns(kind=pl.when(is_end).then(pl.lit("gpu_annotation")).otherwise("kind"))


def _steps(spans: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """Return steps by the job's numbers, else the profiler's, programs of a TPU, or repeated ranges.

    Args:
        marks: the profiler's own steps on each device: a step lasts from the first to the last of them.
    """
    number = pl.coalesce(pl.col("step_name").replace("", None), "name").cast(pl.Int64, strict=False)
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    of_devices = (
        marks.group_by(step=number)
        .agg(pl.col("start_ns").min(), end_ns=end_ns.max())
        .sort("start_ns")
        .with_columns(
            duration_ns=pl.min_horizontal("end_ns", pl.col("start_ns").shift(-1)) - pl.col("start_ns")
        )
    )
    programs = spans.filter(pl.col("line") == _MODULES)
    programs = programs.filter(pl.col("device") == pl.col("device").min())
    longest = programs.group_by("name").agg(pl.len(), pl.col("duration_ns").sum())
    program = "".join(longest.filter(pl.col("len") > 1).sort("duration_ns", "name")["name"].tail(1))
    runs = programs.filter(pl.col("name") == program).with_columns(step=pl.int_range(pl.len()))
    for steps, source in (
        (spans.with_columns(step="step_num"), "StepTraceAnnotation"),
        (of_devices, "the profiler's steps"),
        (runs, f"program {program}"),
    ):
        numbered = steps.drop_nulls("step").unique("step", keep="first", maintain_order=True).sort("step")
        if numbered.height:
            return numbered.select("step", "start_ns", "duration_ns", source=pl.lit(source))
    return find_steps(spans).with_columns(pl.col("source").str.replace("^NVTX ", "TraceMe "))


@dataclass
class _Profile:
    """The contents of a profile read so far.

    Attributes:
        parts: events of one line each, with columns of `spans`, their `line` and facts.
        began_ns: offset of times to the wall clock.
        pid: -1 where unknown.
        skipped: number of events that were skipped, by reason.
    """

    host: str
    parts: list[pl.DataFrame] = field(default_factory=list)
    began_ns: int = 0
    pid: int = -1
    gpus: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: {XLA: "of an unknown version"})
    skipped: Counter[str] = field(default_factory=Counter)


def _read(path: Path) -> _Profile:
    """Read the planes of a file, one line at a time.

    Raises:
        InputError: the file is damaged, or has no events.
        MissingExtra: the library that reads protocol buffers is not installed.
    """
    messages = _messages()
    from google.protobuf.message import DecodeError

    try:
        space = messages["Space"].FromString(read_bytes(path))
        host = "".join(_text(name) for name in space.hostnames[:1])
        profile = _Profile(host or path.name.removesuffix(".gz").removesuffix(".xplane.pb"))
        for content in space.planes:
            _add_plane(messages["Plane"].FromString(content), messages["Line"], profile)
    except DecodeError as error:
        raise InputError(f"{path}: damaged or cut profile of XLA; copy or record it again") from error
    if not profile.parts:
        raise InputError(f"{path}: a profile without an event; record it around steps that run")
    return profile


@cache
def _messages() -> Mapping[str, Any]:
    """Return the classes of the format's messages.

    Raises:
        MissingExtra: the library that reads protocol buffers is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise MissingExtra("perfetto", "protobuf") from error
    file = descriptor_pb2.FileDescriptorProto(name="dpro/xplane.proto", package="xplane", syntax="proto2")
    kind = descriptor_pb2.FieldDescriptorProto
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, type_ in map(str.split, fields.split(", ")):
            entry = described.field.add(name=name, number=int(number))
            entry.label = kind.LABEL_REPEATED if type_.startswith("*") else kind.LABEL_OPTIONAL
            if (plain := type_.removeprefix("*")) in _MESSAGES:
                entry.type, entry.type_name = kind.TYPE_MESSAGE, f".xplane.{plain}"
            else:
                entry.type = kind.Type.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    described_as = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(described_as(f"xplane.{name}")) for name in _MESSAGES}


def _text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def _texts(entries: Any) -> dict[int, str]:
    return {entry.key: _text(entry.value.name) for entry in entries}


def _value(stat: Any, texts: Mapping[int, str]) -> int | str:
    """Return the value of a stat; a text may be the name of another stat."""
    if stat.reference:
        return texts.get(stat.reference, "")
    return stat.signed or stat.unsigned & _INT64 or _text(stat.text) or 0


def _add_plane(plane: Any, line_class: Any, profile: _Profile) -> None:
    """Add a plane to the profile: a device, a part of the host, or facts about the recording."""
    name, events, stats = _text(plane.name), _texts(plane.event_names), _texts(plane.stat_names)
    facts = {stats.get(stat.name, ""): _value(stat, stats) for stat in plane.stats}
    if isinstance(began := facts.get("profile_start_time"), int):
        profile.began_ns = began
    if isinstance(pid := facts.get("process_id"), int):
        profile.pid = pid
    versions = {library: facts.get(f"{library}_version") for library in ("jax", "jaxlib")}
    profile.versions |= {library: text for library, text in versions.items() if isinstance(text, str)}
    model = facts.get("device_type_string")
    if isinstance(model, str) and model not in profile.gpus:
        profile.gpus.append(model)
    device = _DEVICE.match(name)
    for content in plane.lines if device or name.startswith("/host:") else ():
        line = line_class.FromString(content)
        title = _text(line.name)
        if device and not (_STREAM.match(title) or title in (_OPS, _ASYNC, _MODULES, _STEPS)):
            profile.skipped[_SUMS] += len(line.events)
            continue
        rows = _events(line, events, stats)
        profile.skipped[_SUMS] += len(line.events) - rows.height
        spans = _on_device(rows, title, int(device[1])) if device else _on_thread(rows, line.id)
        profile.skipped[_INSTANTS] += rows.height - spans.height
        profile.parts.append(spans.with_columns(line=pl.lit(title)))


def _events(line: Any, names: Mapping[int, str], stats: Mapping[int, str]) -> pl.DataFrame:
    """Return the events of a line with their times and facts, without those that only count occurrences."""
    wanted = {number: name for number, name in stats.items() if name in _FACTS}
    times: list[tuple[int, int, int]] = []
    facts: dict[str, dict[int, int | str]] = defaultdict(dict)
    for event in line.events:
        if event.occurrences:
            continue
        for stat in event.stats:
            if stat.name in wanted:
                facts[wanted[stat.name]][len(times)] = _value(stat, stats)
        times.append((event.name, event.offset_ps, event.duration_ps))
    begin_ns = pl.col("begin") // 1000
    spans = pl.DataFrame(times, _EVENT, orient="row").select(
        name=pl.col("name").replace_strict(names, default="", return_dtype=pl.String),
        start_ns=line.start_ns + begin_ns,
        duration_ns=(pl.col("begin") + pl.col("took")) // 1000 - begin_ns,
    )
    return spans.with_columns(
        pl.Series(name, map(facts[name].get, range(spans.height)), dtype, strict=False)
        if name in facts
        else pl.lit(None, dtype).alias(name)
        for name, dtype in _FACTS.items()
    )


def _placed(
    events: pl.DataFrame, kind: pl.Expr, *, device: int = -1, stream: int = -1, tid: int = -1
) -> pl.DataFrame:
    details = pl.coalesce("memcpy_details", "memset_details")
    places = {"device": device, "stream": stream, "tid": tid}
    return events.with_columns(
        *(pl.lit(number, pl.Int64).alias(name) for name, number in places.items()),
        kind=kind,
        correlation=pl.col("correlation_id").fill_null(-1),
        bytes=details.str.extract(r"\bsize:(\d+)").cast(pl.Int64, strict=False).fill_null(-1),
    )


def _on_thread(events: pl.DataFrame, thread: int) -> pl.DataFrame:
    """Return events as spans of a thread, without marks that take no time."""
    name = pl.col("name")
    kind = (
        pl.when(name.str.starts_with("$"))  # a call of Python: `$file.py:12 function`
        .then(pl.lit("python"))
        .when(pl.col("correlation_id").is_not_null())
        .then(pl.lit("runtime"))
        .otherwise(pl.lit("annotation"))
    )
    spans = _placed(events, kind, tid=thread & _INT64)
    spans = spans.filter((pl.col("duration_ns") > 0) | (pl.col("kind") != "annotation"))
    return spans.with_columns(name.str.replace(r"^\$(\S+):(\d+) ", "$1($2): ").str.strip_prefix("$"))


def _on_device(events: pl.DataFrame, line: str, device: int) -> pl.DataFrame:
    name, start_ns, end_ns = pl.col("name"), pl.col("start_ns"), pl.col("start_ns") + pl.col("duration_ns")
    plain = {linked: demangled(linked) for linked in events["name"].unique()}
    events = events.with_columns(
        name.replace_strict(plain, default="", return_dtype=pl.String)
        .str.replace(_HLO, "$1")
        .str.replace(r"^Memcpy(\w)2(\w)", "Memcpy ${1}to$2")
    ).sort("start_ns", "duration_ns", descending=[False, True], maintain_order=True)
    kind = (
        pl.when(name.str.contains(_COPY))
        .then(pl.lit("memcpy"))
        .when(name.str.contains("(?i)^memset"))
        .then(pl.lit("memset"))
        .otherwise(pl.lit("kernel"))
    )
    if line in (_MODULES, _STEPS):
        kind = pl.lit("gpu_annotation")
    if line == _OPS:
        # A loop or a call encloses the operations that run in it, so it is not work itself.
        takes_time = pl.when(pl.col("duration_ns") > 0)
        begins, ends = (takes_time.then(at).shift(-1).backward_fill() for at in (start_ns, end_ns))
        holds = ((begins < end_ns) & (ends <= end_ns)).fill_null(False)
        kind = pl.when(holds).then(pl.lit("gpu_annotation")).otherwise(kind)
    stream = _STREAM.match(line)
    work = _placed(events, kind, device=device, stream=int(stream[1]) if stream else 0)
    if line == _ASYNC:
        streams = pl.Series([*_side_by_side(work)], dtype=pl.Int64)
        work = work.with_columns(name.str.replace(_ENDS, "$2"), stream=streams)
    return work


def _side_by_side(work: pl.DataFrame) -> Iterator[int]:
    """Yield a stream, numbered from 1, for each piece of work in order of starts, such that none overlap."""
    running: list[tuple[int, int]] = []
    for start_ns, duration_ns in work.select("start_ns", "duration_ns").iter_rows():
        stream = len(running) + 1
        if running and running[0][0] <= start_ns:
            stream = heapq.heappop(running)[1]
        heapq.heappush(running, (start_ns + duration_ns, stream))
        yield stream
