"""Execution traces of PyTorch and Chakra: the operators of one process and their dependencies.

Reads a JSON file; returns a `RankTrace` with the operators as spans and their `dependencies`. Traces have
times only if a tool has linked them with a profiler's. Otherwise start and duration are -1, and only
`combine` can use the trace: it adds the dependencies to the spans of the Kineto trace of the same process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Raw

from dpro.errors import InputError
from dpro.ingest.derived import find_steps
from dpro.ingest.kineto.collectives import gpu_collectives
from dpro.ingest.kineto.events import NO_ARGS
from dpro.ingest.reading.files import rank_of_name, read_bytes
from dpro.ingest.reading.values import int64, mapping, sequence, text
from dpro.ingest.trace import RankTrace
from dpro.schema import DEPENDENCIES, SPANS
from dpro.units import NS_PER_US

SOURCE = "execution trace"
_ROUNDING_NS = 2_000
_USER_SCOPE = 7  # PyTorch's RecordScope of ranges that users name
_GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}


def is_execution_trace(head: bytes) -> bool:
    """Return whether the first bytes of a file are those of an execution trace, in JSON or protobuf."""
    if is_protobuf(head):
        return True
    is_json = head.lstrip().startswith(b"{") and b'"traceEvents"' not in head
    has_nodes = b'"nodes"' in head and re.search(rb'"(?:ctrl_deps|rf_id)"', head) is not None
    return is_json and has_nodes


def read_execution_trace(path: Path, *, rank: int | None = None) -> RankTrace:
    """Read one process's execution trace.

    Args:
        path: the file; its name gives the rank (`rank3`).
        rank: the rank, where the caller knows better.

    Returns:
        Operators as `spans` ordered by start, whose `external_id` is the number of the record function and
        whose `tid` is the observer's own; `dependencies` between them; `workers`. Where the trace has times,
        also `collectives` (kernels, recognised by their names) and `steps`.

    Raises:
        InputError: the file is damaged, is not an execution trace, or is one in protobuf.
    """
    document = decode(read_bytes(path), path)
    stated = rank_of_name(path.name) if rank is None else rank
    skipped = {"malformed nodes": document.malformed} if document.malformed else {}
    nodes = _plausible(document.nodes, skipped)
    spans = _spans(nodes, document.pid)
    worker = {"pid": [document.pid], "source": [SOURCE]}
    pairs: dict[str, Pairs] = {"data": data_pairs(nodes), "control": caller_pairs(nodes)}
    rows = [(source, target, kind) for kind, edges in pairs.items() for source, target in edges]
    frames = {"spans": spans, "dependencies": _rows(rows), "workers": pl.DataFrame(worker)}
    if not lacks_times(spans):
        positioned = spans.with_columns(position=pl.int_range(pl.len()))
        collectives = gpu_collectives(positioned, [NO_ARGS] * spans.height, {}, stated)
        frames["collectives"] = collectives.with_row_index("collective_id")
        frames["steps"] = find_steps(spans)
        frames["dependencies"] = _in_time(frames["dependencies"], spans)
    return RankTrace(
        rank=stated,
        world_size=-1,
        frames={name: _stamped(name, frame, stated) for name, frame in frames.items()},
        versions={"execution trace schema": document.schema} if document.schema else {},
        skipped=skipped,
    )


def _plausible(nodes: Sequence[Node], skipped: dict[str, int]) -> Sequence[Node]:
    """Return nodes with plausible times and count the others; all nodes where none has a time.

    Some linking tools give GPU work the time at which its launch returned. It then overlaps on its stream,
    and its real start is unknown.
    """
    if all(node.start_ns < 0 for node in nodes):
        return nodes
    timed = [node for node in nodes if node.start_ns >= 0 and node.duration_ns >= 0]
    believed = [node for node in timed if not node.category] if _overlap(timed) else timed
    counts = {
        "operators without a time": len(nodes) - len(timed),
        "GPU work with the times of its launches": len(timed) - len(believed),
    }
    skipped.update({reason: count for reason, count in counts.items() if count})
    return believed


def _overlap(nodes: Sequence[Node]) -> bool:
    """Return whether GPU work begins before its predecessor on the stream has ended."""
    ends: dict[tuple[int, int], int] = {}
    for node in sorted((node for node in nodes if node.stream >= 0), key=lambda node: node.start_ns):
        lane = node.device, node.stream
        if node.start_ns + _ROUNDING_NS < ends.get(lane, 0):
            return True
        ends[lane] = node.start_ns + node.duration_ns
    return False


def lacks_times(spans: pl.DataFrame) -> bool:
    """Return whether no span has a time."""
    return not bool((spans["start_ns"] >= 0).any())


def refuse_alone(trace: RankTrace, name: str) -> None:
    """Raise if an execution trace without times has no Kineto trace beside it.

    Raises:
        InputError: the trace has no times.
    """
    if lacks_times(trace.frames["spans"]):
        wanted = "import it together with the Kineto trace of the same process"
        raise InputError(f"{name}: an execution trace without times; {wanted}")


def combine(kineto: RankTrace, et: RankTrace) -> RankTrace:
    """Add the dependencies in an execution trace to the Kineto trace of the same process.

    A caller without a span is replaced by its own caller. A data dependency is left out where either operator
    has no span, or where times contradict it.

    Returns:
        The Kineto trace with `dependencies` between its spans. Where the two traces are of different
        processes, nothing is added, and a warning says why.
    """
    pids = _pids(kineto), _pids(et)
    if all(pids) and pids[0].isdisjoint(pids[1]):
        return _warned(
            kineto, f"the execution trace is of process {min(pids[1])}, not of {min(pids[0])}: left out"
        )
    spans, operators = kineto.frames["spans"], et.frames["spans"]
    links = link(operators, spans)
    if links.pairs.is_empty():
        return _warned(kineto, "the execution trace has no operator of this trace: left out")
    dependencies = et.frames.get(DEPENDENCIES.name, DEPENDENCIES.empty())
    rows = _in_time(_between_spans(dependencies, dict(links.pairs.iter_rows())), spans)
    window = spans["window"].min() if "window" in spans.columns else 0
    frame = _stamped(DEPENDENCIES.name, rows, kineto.rank).with_columns(window=pl.lit(window, dtype=pl.Int32))
    combined = replace(kineto, frames={**kineto.frames, DEPENDENCIES.name: frame})
    missed = operators.filter(pl.col("kind").is_in(CPU_KINDS)).height - links.pairs.height
    skipped = dict(combined.skipped)
    if missed:
        skipped["operators of an execution trace without a span"] = missed
    counted = replace(combined, skipped=skipped)
    if links.fits == 1:
        return counted
    return _warned(
        counted,
        f"the execution trace fits {links.fits} places of the trace equally well: matched to the first",
    )


def _spans(nodes: Sequence[Node], pid: int) -> pl.DataFrame:
    """Return operators and GPU work as spans; GPU work has the number of the operator that issued it."""
    numbers = {node.node_id: node.record_function for node in nodes}
    on_gpu = pl.Series([bool(node.category) for node in nodes], dtype=pl.Boolean)
    columns = {
        "kind": [_kind(node) for node in nodes],
        "name": fields(nodes, "name"),
        "start_ns": fields(nodes, "start_ns"),
        "duration_ns": fields(nodes, "duration_ns"),
        "tid": fields(nodes, "thread"),
        "device": fields(nodes, "device"),
        "stream": fields(nodes, "stream"),
        "correlation": fields(nodes, "correlation"),
        "external_id": [numbers.get(n.parent, -1) if n.category else n.record_function for n in nodes],
        "sequence_number": fields(nodes, "sequence_number"),
        "forward_thread": fields(nodes, "forward_thread"),
        "bytes": fields(nodes, "bytes"),
        "shapes": fields(nodes, "shapes"),
    }
    schema = {name: pl.String if name == "kind" else SPANS.dtypes[name] for name in columns}
    # A device number outside of this range is invalid.
    frame = pl.DataFrame(columns, schema={**schema, "device": pl.Int64}).with_columns(
        pl.when(pl.col("device").is_between(0, 1 << 20)).then("device").otherwise(-1).alias("device")
    )
    return frame.with_columns(
        span_id=pl.int_range(pl.len(), dtype=pl.Int64),
        pid=pl.when(on_gpu).then(-1).otherwise(pid),
        tid=pl.when(on_gpu).then(-1).otherwise("tid"),
    )


def _kind(node: Node) -> str:
    if node.category:
        return _GPU_KINDS[node.category]
    return "annotation" if node.scope == _USER_SCOPE else "cpu_op"


def _rows(rows: Sequence[tuple[int, int, str]]) -> pl.DataFrame:
    schema = {name: DEPENDENCIES.dtypes[name] for name in ("source_span_id", "target_span_id", "kind")}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(source=pl.lit(SOURCE))


def _between_spans(dependencies: pl.DataFrame, spans: Mapping[int, int]) -> pl.DataFrame:
    """Translate dependencies between operators to their spans."""
    pairs = {
        kind: rows.select("source_span_id", "target_span_id").rows()
        for (kind,), rows in dependencies.partition_by("kind", as_dict=True).items()
    }
    caller = {target: source for source, target in pairs.get("control", [])}
    rows = [(source, target, "data") for source, target in pairs.get("data", [])]
    rows += [(_nearest(target, caller, spans), target, "control") for target in caller]
    return _rows(
        [
            (spans[source], spans[target], kind)
            for source, target, kind in rows
            if {source, target} <= spans.keys()
        ]
    )


def _nearest(operator: int, caller: Mapping[int, int], spans: Mapping[int, int]) -> int:
    """Return the innermost caller that has a span; -1 for none."""
    seen = {operator}
    ancestor = caller.get(operator, -1)
    while ancestor >= 0 and ancestor not in spans and ancestor not in seen:
        seen.add(ancestor)
        ancestor = caller.get(ancestor, -1)
    return ancestor


def _in_time(rows: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Drop data dependencies whose target began before the source had ended.

    Profilers round start and duration to a microsecond each, so that a successor may seem to begin early.
    """
    ends = spans.select(source_span_id="span_id", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    starts = spans.select(target_span_id="span_id", begin_ns="start_ns")
    timed = rows.join(ends, on="source_span_id", how="left", maintain_order="left").join(
        starts, on="target_span_id", how="left", maintain_order="left"
    )
    possible = pl.col("end_ns") <= pl.col("begin_ns") + _ROUNDING_NS
    return timed.filter((pl.col("kind") == "control") | possible).drop("end_ns", "begin_ns")


def _warned(trace: RankTrace, warning: str) -> RankTrace:
    return replace(trace, warnings=[*trace.warnings, f"rank {trace.rank}: {warning}"])


def _pids(trace: RankTrace) -> set[int]:
    workers = trace.frames.get("workers")
    has_pids = workers is not None and "pid" in workers.columns
    return (
        {pid for pid in workers["pid"] if pid is not None and pid >= 0}
        if has_pids and workers is not None
        else set()
    )


def _stamped(name: str, frame: pl.DataFrame, rank: int) -> pl.DataFrame:
    stamped = frame.with_columns(rank=pl.lit(rank, dtype=pl.Int32))
    has_window = name not in ("workers", "steps")
    return stamped.with_columns(window=pl.lit(0, dtype=pl.Int32)) if has_window else stamped


# Dependencies between the operators of an execution trace.

Pairs = list[tuple[int, int]]
"""(index of the source, index of the target) in the sequence of nodes."""


def parents(nodes: Sequence[Node]) -> list[int]:
    """Return the index of each node's parent; -1 for none."""
    places = index_of(nodes)
    places_of_parents = [places.get(node.parent, -1) for node in nodes]
    return [parent if parent != place else -1 for place, parent in enumerate(places_of_parents)]


def caller_pairs(nodes: Sequence[Node]) -> Pairs:
    """Return the pair (caller, node) of each node with a parent."""
    return [(parent, place) for place, parent in enumerate(parents(nodes)) if parent >= 0]


def data_pairs(nodes: Sequence[Node]) -> Pairs:
    """Pair each node with the last writers, before it began, of the tensors that it reads.

    An operator and the operators it calls name the same tensors. A hand-over is recorded once, between the
    outermost operators that both name the tensor and are not inside each other.
    """
    parent_of = parents(nodes)
    writers = _Writers(nodes)
    sources: list[dict[int, int]] = []
    pairs: dict[tuple[int, int], None] = {}
    for place, node in enumerate(nodes):
        writers.begin(place, parent_of[place])
        sources_by_tensor = {tensor: writers.last(tensor, node.thread) for tensor in node.reads}
        sources.append({tensor: source for tensor, source in sources_by_tensor.items() if source >= 0})
        outer = sources[parent_of[place]] if 0 <= parent_of[place] < place else {}
        for tensor, source in sources[place].items():
            if outer.get(tensor) != source:
                pairs[source, place] = None
    return list(pairs)


class _Writers:
    """The last writer of each tensor, updated as nodes begin one after the other.

    A node writes when it ends. On its own thread it has ended when a node begins that it did not call; on
    other threads nothing shows that it has, but a new tensor must come from a node still open.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._ended: dict[int, int] = {}  # tensor -> index
        self._open: dict[int, list[int]] = {}  # thread -> indices, outermost first

    def begin(self, place: int, parent: int) -> None:
        stack = self._open.setdefault(self._nodes[place].thread, [])
        while stack and stack[-1] != parent:
            ended = stack.pop()
            self._ended.update(dict.fromkeys(self._nodes[ended].writes, ended))
        stack.append(place)

    def last(self, tensor: int, thread: int) -> int:
        """Return the index of the last writer as seen from a thread, the outermost if nested; -1 for none."""
        best = self._ended.get(tensor, -1)
        for other, stack in self._open.items():
            writing = [place for place in stack if tensor in self._nodes[place].writes]
            if other == thread or not writing:
                continue
            # Nodes that began on a thread after a node that is still open are inside it.
            inside = best > writing[0] and self._nodes[best].thread == other
            if inside or writing[-1] > best:
                best = writing[0]
        return best


# Matching of operators of an execution trace with spans of the Kineto trace of the same process.

CPU_KINDS = ("cpu_op", "annotation")
_TRUSTED = 0.9  # share of the operators found by number that must agree in name for numbers to count
_FITTING = 0.5  # share of a thread's operators that must agree in name for a match
_COMPARISONS = 10_000_000  # maximum pairs compared per thread; the most common names are left out
_SKIP = 8  # maximum operators missing on either side before the next that agree
_AGREE = 4  # operators in a row that must agree then

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TwinLinks:
    """Matches between operators and spans.

    Attributes:
        pairs: columns `et` and `span_id`, each id at most once.
        fits: number of places at which the thread with the most operators fits equally well; 1 where numbers
            decided.
    """

    pairs: pl.DataFrame
    fits: int


def link(operators: pl.DataFrame, spans: pl.DataFrame) -> TwinLinks:
    """Find the span of each operator.

    Args:
        operators: spans of an execution trace, with `span_id` ordered by start, `external_id`, `name` and
            `tid`, which is the observer's own.
        spans: spans of the Kineto trace.
    """
    cpu = spans.filter(pl.col("kind").is_in(CPU_KINDS))
    on_cpu = operators.filter(pl.col("kind").is_in(CPU_KINDS))
    numbered = _by_number(on_cpu, cpu)
    return TwinLinks(numbered, 1) if numbered is not None else _by_order(on_cpu, cpu)


def _by_number(operators: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame | None:
    """Return pairs with equal number and name; None where too many numbers lead to other names."""
    named = operators.filter(pl.col("external_id") > 0).select("external_id", "name", et="span_id")
    numbered = named.join(spans.select("external_id", "span_id", span_name="name"), on="external_id")
    agreed = numbered.filter(pl.col("name") == pl.col("span_name"))
    if not agreed.height or agreed.height < _TRUSTED * numbered.height:
        return None
    pairs = agreed.select("et", "span_id").sort("et", "span_id")
    return pairs.unique("et", keep="first", maintain_order=True).unique(
        "span_id", keep="first", maintain_order=True
    )


def _by_order(operators: pl.DataFrame, spans: pl.DataFrame) -> TwinLinks:
    # An observer does not see the profiler's own marks. Numbers decide the order within a microsecond.
    seen = spans.filter(~pl.col("name").str.starts_with("ProfilerStep#")).sort(
        "tid", "start_ns", "external_id", "span_id"
    )
    names = pl.concat([operators["name"], seen["name"]]).rank("dense").cast(pl.Int64).to_numpy()
    ours = operators.select("span_id", "tid", code=pl.Series(names[: operators.height]))
    theirs = seen.select("span_id", "tid", "start_ns", code=pl.Series(names[operators.height :]))
    threads = {key[0]: part for key, part in theirs.partition_by("tid", as_dict=True).items()}
    pairs: Pairs = []
    starts: dict[int, int] = {}  # start of the linked span, by operator
    fits, most = 1, 0
    for part in ours.sort("span_id").partition_by("tid", maintain_order=True):
        first = int(part["span_id"][0])
        earlier = max((start_ns for operator, start_ns in starts.items() if operator < first), default=-1)
        thread, offset, equal = _best_stretch(part["code"].to_numpy(), threads, earlier)
        if thread is None:
            continue
        steps = _follow(part["code"].to_numpy(), threads[thread]["code"].to_numpy(), offset)
        if len(steps) < _FITTING * part.height:
            continue
        twin, operator_ids = threads.pop(thread), part["span_id"].to_list()
        span_ids, times = twin["span_id"].to_list(), twin["start_ns"].to_list()
        pairs += [(operator_ids[i], span_ids[k]) for i, k in steps]
        starts |= {operator_ids[i]: times[k] for i, k in steps}
        if len(steps) > most:
            fits, most = equal, len(steps)
    frame = pl.DataFrame(pairs, schema={"et": pl.Int64, "span_id": pl.Int64}, orient="row")
    return TwinLinks(frame.sort("et"), fits)


def _best_stretch(
    codes_here: Codes, threads: dict[int, pl.DataFrame], earlier: int
) -> tuple[int | None, int, int]:
    """Return thread, offset of the first operator, and number of equal fits.

    Of equal fits, returns the first that does not begin before `earlier`: the latest start of linked
    operators, on other threads, that precede this thread's first operator.
    """
    best: tuple[int | None, int, int] = (None, 0, 0)
    most = 0
    for thread in sorted(threads):
        codes = threads[thread]["code"].to_numpy()
        votes = _votes(codes_here, codes)
        if votes.max(initial=0) <= most:
            continue
        most = int(votes.max())
        offsets = np.flatnonzero(votes == most) - (codes_here.size - 1)
        firsts = threads[thread]["start_ns"].to_numpy()[np.maximum(offsets, 0)]
        later = offsets[firsts >= earlier]
        best = (thread, int(later[0] if later.size else offsets[-1]), offsets.size)
    return best


def _votes(ours: Codes, theirs: Codes) -> Codes:
    """Count operators that agree in name, [N] by offset from `1 - len(ours)`; rare names count first."""
    votes = np.zeros(ours.size + theirs.size, dtype=np.int64)
    order_ours, order_theirs = np.argsort(ours, kind="stable"), np.argsort(theirs, kind="stable")
    codes = np.intersect1d(ours, theirs)
    bounds_ours = _bounds(ours[order_ours], codes)
    bounds_theirs = _bounds(theirs[order_theirs], codes)
    sizes = np.diff(bounds_ours, axis=0)[0] * np.diff(bounds_theirs, axis=0)[0]
    compared = 0
    for code in np.argsort(sizes, kind="stable"):
        compared += int(sizes[code])
        if compared > _COMPARISONS and compared > sizes[code]:
            break
        here = order_ours[bounds_ours[0, code] : bounds_ours[1, code]]
        there = order_theirs[bounds_theirs[0, code] : bounds_theirs[1, code]]
        places = (there[:, None] - here[None, :] + ours.size - 1).ravel()
        votes += np.bincount(places, minlength=votes.size)
    return votes


def _bounds(ordered: Codes, codes: Codes) -> npt.NDArray[np.int64]:
    """Return two rows: where each code begins and ends in a sorted sequence."""
    return np.stack([np.searchsorted(ordered, codes, side) for side in ("left", "right")])


def _follow(ours: Codes, theirs: Codes, offset: int) -> Pairs:
    """Return pairs of agreeing indices from an offset on, skipping operators that only one side has."""
    pairs: Pairs = []
    here, there = 0, offset
    while here < ours.size and there < theirs.size:
        if there >= 0 and ours[here] == theirs[there]:
            pairs.append((here, there))
            here, there = here + 1, there + 1
            continue
        here, there = _resume(ours, theirs, here, there)
    return pairs


def _resume(ours: Codes, theirs: Codes, here: int, there: int) -> tuple[int, int]:
    """Return the nearest indices at which several names in a row agree; else the next on both sides."""
    for skip in range(1, _SKIP + 1):
        for i, k in ((here, there + skip), (here + skip, there)):
            ahead = min(_AGREE, ours.size - i)
            if (
                ahead > 0
                and 0 <= k <= theirs.size - ahead
                and (ours[i : i + ahead] == theirs[k : k + ahead]).all()
            ):
                return i, k
    return here + 1, there + 1


# Nodes of an execution trace, independent of its schema.

_NOTHING = Raw(b"")
_ROOT = re.compile(r"^\[pytorch\|profiler\|execution_(graph|trace)\|(process|thread)\]$")
_NO_NUMBER = re.compile(rb"(?<=[\[,:\s])-?(?:inf|nan|Infinity|NaN)(?=[\s,\]}])")
# Chakra's binary form begins with the length of its metadata, whose first field is the version as text.
_PROTOBUF = re.compile(rb"^[\x04-\x7f]\x0a[\x03-\x40]\d+\.\d+\.\d+", re.DOTALL)


class _Node(msgspec.Struct, gc=False):
    id: int
    name: str = ""
    parent: Any = None
    ctrl_deps: Any = None
    rf_id: Any = None
    seq_id: Any = None
    scope: Any = None
    tid: Any = None
    fw_tid: Any = None
    inputs: Any = None
    outputs: Any = None
    input_types: Any = None
    output_types: Any = None
    input_shapes: Any = None
    attrs: Any = None
    cat: Any = None
    stream: Any = None
    args: Any = None
    ts: Raw = _NOTHING
    dur: Raw = _NOTHING
    inclusive_dur: Raw = _NOTHING


class _Document(msgspec.Struct):
    nodes: list[Raw]
    schema: Any = None
    pid: Any = None


@dataclass(frozen=True)
class Node:
    """An operator, annotation, or (in linked traces) piece of GPU work.

    Attributes:
        parent: node id of its caller; -1 for none.
        record_function: number that counts PyTorch's record functions by start; -1 for GPU work.
        sequence_number: autograd's; -1 for none.
        scope: PyTorch's number for the kind of function; -1 unknown.
        thread: the observer's own number of the thread.
        forward_thread: the observer's number of the forward thread; 0 for none.
        category: Kineto's category of GPU work; empty on the CPU.
        device, stream, correlation, bytes: of GPU work; -1 unknown.
        start_ns, duration_ns: from a linked profiler; -1 without one.
        reads, writes: ids of tensors.
        shapes: shapes of the inputs as JSON.
    """

    node_id: int
    parent: int
    name: str
    record_function: int
    sequence_number: int
    scope: int
    thread: int
    forward_thread: int
    category: str
    device: int
    stream: int
    correlation: int
    bytes: int
    start_ns: int
    duration_ns: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    shapes: str


@dataclass(frozen=True)
class ExecutionTrace:
    """A file: schema version, process, nodes ordered by start, and number of malformed nodes."""

    schema: str
    pid: int
    nodes: list[Node]
    malformed: int


def is_protobuf(head: bytes) -> bool:
    """Return whether a file begins like Chakra's binary form."""
    return _PROTOBUF.match(head) is not None


def decode(data: bytes, path: Path) -> ExecutionTrace:
    """Decode an execution trace.

    Raises:
        InputError: not an execution trace, truncated, in Chakra's binary form, or without a node.
    """
    if is_protobuf(data):
        raise InputError(
            f"{path}: a Chakra trace in protobuf; give the JSON execution trace it was made from"
        )
    document = _document(data, path)
    decoder = msgspec.json.Decoder(_Node)
    nodes, malformed = [], 0
    for raw in document.nodes:
        try:
            nodes.append(decoder.decode(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            malformed += 1
    kept = [node for node in map(_node, nodes) if not _ROOT.match(node.name)]
    if not kept:
        raise InputError(f"{path}: an execution trace without an operator; record it around some work")
    # Nodes are written when they end. GPU work has no number and comes last.
    kept.sort(key=lambda node: (node.record_function < 0, node.record_function, node.node_id))
    return ExecutionTrace(text(document.schema), int64(document.pid), kept, malformed)


def _document(data: bytes, path: Path) -> _Document:
    wanted = "give an execution trace of PyTorch"
    try:
        try:
            return msgspec.json.decode(data, type=_Document)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # the observer writes bare -inf, which JSON forbids
            return msgspec.json.decode(_NO_NUMBER.sub(b"null", data), type=_Document)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: JSON, but not an execution trace ({error}); {wanted}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise InputError(f"{path}: JSON cut short; copy or record it again") from error
        raise InputError(f"{path}: not JSON ({error}); {wanted}") from error


def _node(node: _Node) -> Node:
    """Convert a node from either schema: flat fields (1.0.1), or `attrs` (Chakra)."""
    attributes = {text(a.get("name")): a.get("value") for a in map(mapping, sequence(node.attrs))}
    args = mapping(node.args)
    on_gpu = text(node.cat) in ("kernel", "gpu_memcpy", "gpu_memset")

    def field(name: str) -> int:
        value = getattr(node, name)
        return int64(attributes.get(name) if value is None else value)

    inputs, outputs = mapping(node.inputs), mapping(node.outputs)  # empty unless Chakra: lists
    # GPU work lists all tensors of its operator, so it would seem to read what it writes.
    reads = (
        () if on_gpu else _tensors(inputs.get("values", node.inputs), inputs.get("types", node.input_types))
    )
    writes = (
        ()
        if on_gpu
        else _tensors(outputs.get("values", node.outputs), outputs.get("types", node.output_types))
    )
    shapes = inputs.get("shapes", node.input_shapes)
    return Node(
        node_id=int64(node.id),
        parent=int64(node.parent if node.ctrl_deps is None else node.ctrl_deps),
        name=text(node.name),
        record_function=-1 if on_gpu else field("rf_id"),
        sequence_number=field("seq_id"),
        scope=field("scope"),
        thread=field("tid"),
        forward_thread=field("fw_tid"),
        category=text(node.cat) if on_gpu else "",
        device=int64(args.get("device")),
        stream=int64(args.get("stream", node.stream)),
        correlation=int64(args.get("correlation")),
        bytes=int64(args.get("bytes")),
        start_ns=_nanoseconds(node.ts),
        duration_ns=_nanoseconds(node.inclusive_dur if node.dur == _NOTHING else node.dur),
        reads=reads,
        writes=writes,
        shapes=msgspec.json.encode(shapes).decode() if isinstance(shapes, list) and shapes else "",
    )


def _tensors(values: Any, types: Any) -> tuple[int, ...]:
    """Return the ids of all tensors among values, including those in lists, each once."""
    identifiers: dict[int, None] = {}
    for value, kind in zip(sequence(values), sequence(types), strict=False):
        for tensor in _flat(value, text(kind)):
            if tensor and (identifier := int64(tensor[0])) > 0:
                identifiers[identifier] = None
    return tuple(identifiers)


def _flat(value: Any, kind: str) -> Iterator[list[Any]]:
    """Yield each tensor of a value as the observer writes it: id, storage, offset, elements, size, device."""
    if kind.startswith("Tensor") and isinstance(value, list):
        yield value
    elif kind.startswith("GenericList[Tensor"):
        yield from (tensor for tensor in sequence(value) if isinstance(tensor, list))


def _nanoseconds(value: Raw) -> int:
    """Convert written microseconds to ns; -1 where missing or negative.

    Uses decimals, since a float loses digits of an absolute time.
    """
    try:
        return max(int64(Decimal(bytes(value).decode().strip('"')) * NS_PER_US), -1)
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return -1


def fields(nodes: Sequence[Node], name: str) -> list[Any]:
    """Return [N] values of one attribute of nodes."""
    return [getattr(node, name) for node in nodes]


def index_of(nodes: Sequence[Node]) -> Mapping[int, int]:
    """Return the index of each node by its id; the first one for a duplicate id."""
    places: dict[int, int] = {}
    for place, node in enumerate(nodes):
        places.setdefault(node.node_id, place)
    return places
