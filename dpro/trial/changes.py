"""Changes that `dpro try` can make to a job: one table, which is also the map from what-if edits to them.

In: what the user typed, in the form of what-if edits. Out: a `Change`: the file of
`collectors/inside/apply` that makes it with its arguments, and the edit that predicts it. Where a what-if
edit has the same meaning, the text is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpro.collectors.inside.environment import kept
from dpro.errors import UsageError
from dpro.replay.whatif.grammar import nearest, split_edit, values_of
from dpro.words import whole_number

Values = dict[str, Any]
PROBE, PROBES = "probe", "probes."
BUDGET = "budget"  # what is chosen within it depends on what a probe measured


@dataclass(frozen=True)
class Change:
    """One change to a job.

    Attributes:
        text: as the user wrote it.
        kind: its name and what is not a number in it: changes of one kind share one prediction error.
        family: the file that makes it.
        arguments: what that takes.
        edits: the what-if edits that predict it; none where nothing does.
        uneven: whether it changes only some steps, which the mean of steps shows and their median does not.
        samples: how many times as many samples a step has.
        passes: how many times as many samples a forward pass has.
        keeps_loss: whether the job should learn what it did.
        probe: what has to be measured of the job before it is known what to change, such as `compress:probe`.
    """

    text: str
    kind: str
    family: str
    arguments: Values
    edits: tuple[str, ...] = ()
    uneven: bool = False
    samples: float = 1.0
    passes: float = 1.0
    keeps_loss: bool = True
    probe: str = ""

    @property
    def is_probe(self) -> bool:
        """Whether it measures the job and changes nothing."""
        return self.family.startswith(PROBES)

    def document(self) -> dict[str, Any]:
        """Return it as the recorder reads it."""
        return {"edit": self.text, "family": self.family, "arguments": self.arguments}


@dataclass(frozen=True)
class ChangeRow:
    """One row of the table.

    Attributes:
        summary: what is changed, a few words.
        family: the file of `collectors/inside/apply` that makes the change.
        keys: what the user may give, and how each value is read.
        example: as the user writes it.
        arguments: the family's arguments for what was given.
        alone: whether no key need be given, as where each has a default.
        defaults: what is taken for keys that are not given.
        edits: the what-if edits that predict what was given, where they have another text.
        uneven, samples, passes, keeps_loss: as `Change`, the numbers from what was given.
    """

    summary: str
    family: str
    keys: Mapping[str, Callable[[str], Any]]
    example: str
    arguments: Callable[[Values], Values] = dict
    alone: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    edits: Callable[[Values], tuple[str, ...]] | None = None
    uneven: bool = False
    samples: Callable[[Values], float] = lambda _: 1.0
    passes: Callable[[Values], float] = lambda _: 1.0
    keeps_loss: bool = True


def _flag(text: str) -> bool:
    flags = {"true": True, "false": False}
    if text not in flags:
        raise ValueError("must be true or false")
    return flags[text]


def _size(text: str) -> float:
    size = float(text)
    if not 0 < size < 1e6:
        raise ValueError("must be a positive number of MB")
    return size


def _count(minimum: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        count = whole_number(text)
        if count < minimum:
            raise ValueError(f"must be a whole number from {minimum}")
        return count

    return read


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}{nearest(text, words)}")
        return text

    return read


def _autocast_type(text: str) -> str:
    if text == "fp8":
        raise ValueError(
            "is no type of autocast: convert the model where it is built, with torchao "
            "(torchao.float8.convert_to_float8_training, pip install torchao) or Transformer Engine's "
            "fp8_autocast"
        )
    return _one_of("bf16", "fp16")(text)


def _renamed(**names: str) -> Callable[[Values], Values]:
    return lambda values: {names.get(key, key): value for key, value in values.items()}


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise ValueError("must be a number above 0, at most 1")
    return share


def _factor(text: str) -> float:
    factor = float(text)
    if not 1 < factor <= 1024:
        raise ValueError("must be a number above 1, at most 1024")
    return factor


def _milliseconds(text: str) -> float:
    ms = float(text)
    if not 0 < ms <= 60_000:
        raise ValueError("must be a number above 0, at most 60000")
    return ms


def _compression(values: Values) -> Values:
    ways = [key for key in ("to", "powersgd_rank", "topk", BUDGET) if key in values]
    if len(ways) > 1:
        raise UsageError("compress: to, powersgd_rank, topk and budget exclude each other")
    if "module" in values and ways != ["to"]:
        raise UsageError("compress: module needs to=, as in compress:to=bf16,module=layers.*")
    if "topk" in values:
        return {"share": values["topk"], "to": "topk"}
    return (
        {"rank": values["powersgd_rank"], "to": "powersgd"}
        if "powersgd_rank" in values
        else {{"module": "layers"}.get(key, key): value for key, value in values.items()}
    )


def _workers(values: Values) -> tuple[str, ...]:
    return (f"workers:count={values['workers']}",) if "workers" in values else ()


def _compiled(values: Values) -> tuple[str, ...]:
    known = {"default": ("compile",), "reduce-overhead": ("compile", "cuda-graph")}
    return known.get(values.get("mode", "default"), ())


def _precision(values: Values) -> tuple[str, ...]:
    return (f"precision:dtype={values['dtype']}",)


def _late(values: Values) -> Values:
    if len(values) < 2:
        raise UsageError("slow needs rank and ms, as in slow:rank=1,ms=20: a factor cannot be made to a job")
    return values


def _algorithm(values: Values) -> Values:
    if len(values) != 1:
        raise UsageError("algorithm needs to=ring or to=tree, or proto=ll128 (or ll, simple), not both")
    if "proto" in values:
        return {"name": "NCCL_PROTO", "value": PROTOCOLS[values["proto"]], "backend": "nccl"}
    return {"name": "NCCL_ALGO", "value": values["to"].capitalize(), "backend": "nccl"}


PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}  # as NCCL spells them
OF_DDP = ("ddp", "reduction")  # families that need a DistributedDataParallel
CHANGES: dict[str, ChangeRow] = {
    "bucket": ChangeRow(
        "gradient buckets of DDP of another size",
        "ddp", {"mb": _size}, "bucket:mb=25", _renamed(mb="bucket_cap_mb"),
    ),
    "ddp": ChangeRow(
        "other settings of DDP",
        "ddp", dict.fromkeys(("gradient_as_bucket_view", "static_graph", "find_unused_parameters"), _flag),
        "ddp:static_graph=true",
    ),
    "compress": ChangeRow(
        "gradients are compressed before they are reduced",
        "reduction",
        {
            "to": _one_of("fp16", "bf16"), "powersgd_rank": _count(1), "topk": _share, BUDGET: _share,
            "module": str,
        },
        "compress:to=bf16", _compression,
    ),
    "local-updates": ChangeRow(
        "each rank trains on its own; parameters are averaged every few steps (post-local SGD)",
        "reduction", {"every": _count(2)}, "local-updates:every=4", uneven=True,
    ),
    "precision": ChangeRow(
        "the model's forward pass runs under autocast",
        "modules.precision", {"dtype": _autocast_type, BUDGET: _share}, "precision:dtype=bf16",
    ),
    "autocast": ChangeRow(
        "the same",
        "modules.precision", {"dtype": _autocast_type}, "autocast:dtype=bf16", edits=_precision,
    ),
    "compile": ChangeRow(
        "the model is compiled",
        "modules.compiling", {"mode": _one_of("default", "reduce-overhead", "max-autotune")},
        "compile", lambda values: {"mode": "default"} | values, alone=True, edits=_compiled,
    ),
    "cuda-graph": ChangeRow(
        "what the model launches is captured as CUDA graphs, on GPUs",
        "modules.compiling", {}, "cuda-graph", lambda _: {"backend": "cudagraphs"}, alone=True,
    ),
    "recompute": ChangeRow(
        "modules keep their inputs only, and backward computes the rest again",
        "modules.recompute", {"module": str}, "recompute:module=layers.*",
    ),
    "prefetch": ChangeRow(
        "FSDP2 gathers parameters some modules earlier",
        "modules.sharded", {"ahead": _count(1), "only": _one_of("forward", "backward")}, "prefetch:ahead=1",
        defaults={"ahead": 1},
    ),
    "accumulate": ChangeRow(
        "several passes of the loop become one optimizer step, gradients are reduced in the last",
        "accumulate", {"steps": _count(2)}, "accumulate:steps=2", defaults={"steps": 2},
        samples=lambda values: values["steps"],
    ),
    "batch": ChangeRow(
        "DataLoaders make larger batches",
        "data", {"factor": _factor}, "batch:factor=2", defaults={"factor": 2.0},
        samples=lambda values: values["factor"], passes=lambda values: values["factor"],
    ),
    "hide-input": ChangeRow(
        "the batch before is returned again, so that none is waited for",
        "repeat", {}, "hide-input", alone=True, keeps_loss=False,
    ),
    "no-sync": ChangeRow(
        "item() returns what it did a step before, without waiting for the GPU",
        "waits", {}, "no-sync", alone=True,
    ),
    "no-comm": ChangeRow(
        "DDP leaves gradients on each rank as they are",
        "reduction", {}, "no-comm", lambda _: {"to": "nothing"}, alone=True, keeps_loss=False,
    ),
    "algorithm": ChangeRow(
        "NCCL runs its collectives by this algorithm (NCCL_ALGO), or protocol (NCCL_PROTO)",
        "environment", {"to": _one_of("ring", "tree"), "proto": _one_of(*PROTOCOLS)},
        "algorithm:to=tree", _algorithm,
    ),
    "slow": ChangeRow(
        "a rank sleeps at the beginning of each step",
        "host", {"rank": _count(0), "ms": _milliseconds}, "slow:rank=1,ms=20", _late,
    ),
    "workers": ChangeRow(
        "batches are loaded by that many worker processes",
        "data", {"count": _count(0)}, "workers:count=2", _renamed(count="num_workers"),
    ),
    "dataloader": ChangeRow(
        "batches are loaded otherwise, by more settings than the number of workers",
        "data",
        {"workers": _count(0), "prefetch_factor": _count(1)}
        | dict.fromkeys(("pin_memory", "persistent_workers"), _flag),
        "dataloader:workers=2", _renamed(workers="num_workers"), edits=_workers,
    ),
    "optimizer": ChangeRow(
        "another implementation of the optimizer",
        "optimizers", {"impl": _one_of("fused", "foreach", "loop")}, "optimizer:impl=fused",
    ),
    "gc": ChangeRow(
        "Python collects garbage only every few steps, or (0) never",
        "host", {"every": _count(0)}, "gc:every=100", lambda values: {"every": 0} | values,
        alone=True, uneven=True,
    ),
    "threads": ChangeRow(
        "PyTorch uses that many threads",
        "host", {"n": _count(1)}, "threads:n=1", _renamed(n="num_threads"),
    ),
}  # fmt: skip
PROBE_SUMMARIES = {
    f"compress:{PROBE}": "what each codec loses of the job's gradients, and takes; nothing is changed",
    f"precision:{PROBE}": "what each weight loses with fewer bits, and what the loss makes of it",
}
VARIABLE, VARIABLE_EXAMPLE = "env", "env:NCCL_ALGO=Tree"
VARIABLE_SUMMARY = "a variable of the environment, of those that a recording keeps"


def parse_change(text: str) -> Change:
    """Parse a change.

    Raises:
        UsageError: no such change or key (with the nearest one), or a value that is not what it should be.
    """
    name, rest = split_edit(text)
    if name == VARIABLE:
        return _variable(text.strip(), rest)
    if name not in CHANGES:
        raise UsageError(_unknown(name))
    row, text = CHANGES[name], text.strip()
    if rest.strip() == PROBE and f"{name}:{PROBE}" in PROBE_SUMMARIES:
        return Change(text, text, f"{PROBES}{name}", {})
    values = _values(name, row, rest)
    edits = (text,) if row.edits is None else row.edits(values)
    return Change(
        text,
        parse_change(edits[0]).kind if len(edits) == 1 and edits[0] != text else _kind(name, values),
        row.family,
        row.arguments(values),
        edits,
        row.uneven,
        row.samples(values),
        row.passes(values),
        row.keeps_loss,
        f"{name}:{PROBE}" if BUDGET in values else "",
    )


def _kind(name: str, values: Values) -> str:
    words = [
        f"{key}={str(value).lower()}" if isinstance(value, str | bool) and key != "module" else key
        for key, value in values.items()
    ]
    return f"{name}:{','.join(words)}" if words else name


def ensure_compatible(changes: Sequence[Change], environment: Mapping[str, str]) -> None:
    """Refuse changes that cannot be made to one job together, and those that the job already has.

    Raises:
        UsageError: saying which.
    """
    names = [split_edit(change.text)[0] for change in changes]
    for name in names:
        if names.count(name) > 1 and name != VARIABLE:
            raise UsageError(f"{name} is given twice: give its keys together, as in {name}:a=…,b=…")
    if sum(change.family == "reduction" for change in changes) > 1:
        raise UsageError(
            "compress, local-updates and no-comm exclude each other: DDP takes one communication hook"
        )
    if "accumulate" in names and {"local-updates", "no-comm"} & {*names}:
        raise UsageError("accumulate has nothing to add to local-updates and no-comm, which reduce nothing")
    for change in changes:
        if change.family == "environment":
            name, value = change.arguments["name"], change.arguments["value"]
            if environment.get(name) == value:
                raise UsageError(f"{change.text}: {name} is {value} here already: nothing to change")


def kind_of_edit(text: str) -> str:
    """Return the kind of a what-if edit in the ledger; empty where it cannot be tried."""
    try:
        return parse_change(text).kind
    except UsageError:
        return ""


def is_of_ddp(text: str) -> bool:
    """Whether trying a what-if edit changes torch's DDP, which other frameworks have no part in."""
    return parse_change(text).family in OF_DDP


def _values(name: str, row: ChangeRow, rest: str) -> Values:
    values: Values = {}
    for key, value in values_of(name, rest, row.keys, row.example).items():
        try:
            values[key] = row.keys[key](value)
        except ValueError as error:
            raise UsageError(f"{name}: {key} {error}, not {value!r}, as in {row.example}") from error
    if not (values or row.alone or row.defaults):
        raise UsageError(f"{name} needs {' or '.join(row.keys)}, as in {row.example}")
    return {**row.defaults, **values}


def _variable(text: str, rest: str) -> Change:
    name, equals, value = rest.partition("=")
    if not name or not equals:
        raise UsageError(f"{VARIABLE} needs a variable and its value, as in {VARIABLE_EXAMPLE}")
    if not kept({name: value}) or name.endswith("RANK") or name.startswith("SLURM_"):
        raise UsageError(
            f"{text}: not a variable that a recording keeps: those of CUDA, NCCL, gloo, OpenMP, PyTorch, …"
        )
    return Change(text, f"{VARIABLE}:{name}", "environment", {"name": name, "value": value})


def _unknown(name: str) -> str:
    from dpro.replay.whatif.registry import EDITS

    known = [*CHANGES, VARIABLE]
    if name in EDITS:
        return f"{name} can be predicted (dpro whatif), but not made to a job; there are {', '.join(known)}"
    return f"no change {name!r}{nearest(name, known)}; there are {', '.join(known)}"
