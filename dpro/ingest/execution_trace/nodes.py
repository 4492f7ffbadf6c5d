"""Nodes of an execution trace, whatever its schema calls their fields.

In: the bytes of a file: JSON of PyTorch's observer (schema 1.0.1) or Chakra's (1.0.2-chakra to 1.1.1-chakra),
perhaps linked with times by another tool. Out: typed nodes in the order in which they began. It does not
relate nodes to each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw

from dpro.errors import InputError
from dpro.ingest.reading.values import int64, mapping, sequence, text
from dpro.units import NS_PER_US

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
    """One operator, annotation, or (in linked traces) piece of GPU work.

    Attributes:
        node_id: as recorded.
        parent: node id of what called it, -1 none.
        name: as recorded.
        record_function: number that counts PyTorch's record functions by their beginning; -1 for GPU work.
        sequence_number: autograd's, -1 none.
        scope: PyTorch's number for the kind of function, -1 unknown.
        thread: the observer's own number of the thread.
        forward_thread: its number of the forward thread, 0 for none.
        category: as Kineto calls GPU work, empty for anything on a CPU.
        device, stream, correlation, bytes: of GPU work, -1 unknown.
        start_ns, duration_ns: where the file was linked with a profiler's times, else -1.
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
    """A file: its schema version, process, nodes by beginning, and how many were not of a node's shape."""

    schema: str
    pid: int
    nodes: list[Node]
    malformed: int


def is_protobuf(head: bytes) -> bool:
    """Whether a file begins like Chakra's binary form."""
    return _PROTOBUF.match(head) is not None


def decode(data: bytes, path: Path) -> ExecutionTrace:
    """Decode an execution trace.

    Raises:
        InputError: not an execution trace, cut short, in Chakra's binary form, or without a node.
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
    known = [node for node in map(_node, nodes) if not _ROOT.match(node.name)]
    if not known:
        raise InputError(f"{path}: an execution trace without an operator; record it around some work")
    # Nodes are written when they end. GPU work has no number of its own and comes last.
    known.sort(key=lambda node: (node.record_function < 0, node.record_function, node.node_id))
    return ExecutionTrace(text(document.schema), int64(document.pid), known, malformed)


def _document(data: bytes, path: Path) -> _Document:
    wanted = "give an execution trace of PyTorch"
    try:
        try:
            return msgspec.json.decode(data, type=_Document)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # the observer writes values such as -inf as they are
            return msgspec.json.decode(_NO_NUMBER.sub(b"null", data), type=_Document)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: JSON, but not an execution trace ({error}); {wanted}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if "truncated" in str(error):
            raise InputError(f"{path}: JSON cut short; copy or record it again") from error
        raise InputError(f"{path}: not JSON ({error}); {wanted}") from error


def _node(node: _Node) -> Node:
    """A node with the fields of its schema: flat ones (1.0.1), or in `attrs` (Chakra)."""
    attributes = {text(a.get("name")): a.get("value") for a in map(mapping, sequence(node.attrs))}
    args = mapping(node.args)
    on_gpu = text(node.cat) in ("kernel", "gpu_memcpy", "gpu_memset")

    def field(name: str) -> int:
        own = getattr(node, name)
        return int64(attributes.get(name) if own is None else own)

    inputs, outputs = mapping(node.inputs), mapping(node.outputs)  # Chakra's; else lists
    # GPU work is given the tensors of its operator: it would seem to read what it writes.
    reads = (
        () if on_gpu else _tensors(inputs.get("values", node.inputs), inputs.get("types", node.input_types))
    )
    writes = (
        ()
        if on_gpu
        else _tensors(outputs.get("values", node.outputs), outputs.get("types", node.output_types))
    )
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
        shapes=_shapes(inputs.get("shapes", node.input_shapes)),
    )


def _tensors(values: Any, types: Any) -> tuple[int, ...]:
    """Ids of the tensors among some values, also of those in lists, each once."""
    found: dict[int, None] = {}
    for value, kind in zip(sequence(values), sequence(types), strict=False):
        for tensor in _flat(value, text(kind)):
            if tensor and (identifier := int64(tensor[0])) > 0:
                found[identifier] = None
    return tuple(found)


def _flat(value: Any, kind: str) -> Iterator[list[Any]]:
    """Each tensor of a value as what the observer writes: id, storage, offset, elements, size, device."""
    if kind.startswith("Tensor") and isinstance(value, list):
        yield value
    elif kind.startswith("GenericList[Tensor"):
        yield from (tensor for tensor in sequence(value) if isinstance(tensor, list))


def _shapes(shapes: Any) -> str:
    return msgspec.json.encode(shapes).decode() if isinstance(shapes, list) and shapes else ""


def _nanoseconds(value: Raw) -> int:
    """Microseconds as written, in ns, -1 where they are none or negative: through decimals, since a float
    loses digits of an absolute time.
    """
    try:
        return max(int64(Decimal(bytes(value).decode().strip('"')) * NS_PER_US), -1)
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return -1


def fields(nodes: Sequence[Node], name: str) -> list[Any]:
    """One attribute of all nodes.

    Args:
        nodes: [N] nodes.

    Returns:
        [N] values.
    """
    return [getattr(node, name) for node in nodes]


def index_of(nodes: Sequence[Node]) -> Mapping[int, int]:
    """Place of each node by its id; the first one where an id comes twice."""
    places: dict[int, int] = {}
    for place, node in enumerate(nodes):
        places.setdefault(node.node_id, place)
    return places
