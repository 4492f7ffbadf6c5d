"""How profiles of XLA's programs are recognised, and the names of its operations."""

from dpro.ingest.formats import Format

XPLANE = Format("XPlane", "dpro.extensions.xplane.xspace", "read_xspace", (b"\n",), "is_xspace")

_ENDS = r"(-start|-done)?(\.\d+)*$"
_OPS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "(ragged-)?all-to-all": "all_to_all",
    "collective-permute": "send_recv",
    "collective-broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
# What XLA calls its instructions, and fusions by what is in them.
CLASSES = [
    *(
        {"pattern": f"^(async-)?{name}{_ENDS}", "kind": "communication", "op": op}
        for name, op in _OPS.items()
    ),
    {"pattern": rf"^(\w+_)*dot(_\w+)*{_ENDS}", "kind": "gemm"},
]
