"""Table of the changes that `dpro try` can make to a job, and of the what-if edits that predict them.

Takes what the user typed, in the form of what-if edits; returns a `Change`: the family in
`inside/` that makes it, with its arguments, and the edit that predicts it. A change and a
what-if edit of one meaning have the same text.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpro.collectors.inside.environment import kept
from dpro.errors import DproError, UsageError
from dpro.extensions.tensors.plan_file import read_plan
from dpro.replay.whatif.grammar import MAX_TIMES, Key, count_key, quoted, read_values, split_edit
from dpro.words import suggest

if TYPE_CHECKING:
    from dpro.replay.whatif.predict import Prediction
    from dpro.store import Run

Values = dict[str, Any]
PROBE, PROBES = "probe", "probes."
BUDGET = "budget"  # the choice within a budget depends on a probe's measurements


@dataclass(frozen=True)
class Change:
    """One change to a job.

    Attributes:
        text: as the user wrote it.
        kind: its name and arguments without numbers; changes of one kind share one prediction error.
        family: code that makes it, in `inside/`.
        arguments: of the family.
        edits: the what-if edits that predict it; empty if none do.
        uneven: whether it changes only some steps, which the mean of steps shows and their median does not.
        samples: factor on the samples of a step.
        passes: factor on the samples of a forward pass.
        keeps_loss: whether the job should learn the same as before.
        probe: the probe whose measurements decide what to change, such as `compress:probe`; empty for none.
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

    @property
    def changes_threads(self) -> bool:
        """Whether it changes the job's processes or threads, and so how long they wait for cores."""
        return self.family in ("data", "environment")

    def document(self) -> dict[str, Any]:
        """Return the change in the form that the recorder reads."""
        return {"edit": self.text, "family": self.family, "arguments": self.arguments}


@dataclass(frozen=True)
class ChangeRow:
    """One row of the table.

    Attributes:
        summary: what is changed, in a few words.
        family: code that makes the change, in `inside/`.
        keys: keys that the user may give.
        example: as the user writes it.
        arguments: returns the family's arguments for the given values.
        alone: whether it may be given without keys.
        edits: returns the what-if edits that predict the given values; None if their text is the change's.
        uneven, samples, passes, keeps_loss: as in `Change`, numbers from the given values.
    """

    summary: str
    family: str
    keys: Sequence[Key]
    example: str
    arguments: Callable[[Values], Values] = dict
    alone: bool = False
    edits: Callable[[Values], tuple[str, ...]] | None = None
    uneven: bool = False
    samples: Callable[[Values], float] = lambda _: 1.0
    passes: Callable[[Values], float] = lambda _: 1.0
    keeps_loss: bool = True


def _word(name: str, *choices: str, default: Any = None) -> Key:
    return Key(name, str, "", default, choices=choices)


def _amount(name: str, most: float, default: Any = None, least: float = 1 / MAX_TIMES) -> Key:
    return Key(name, float, "", default, least, most)


def _flags(*names: str) -> list[Key]:
    return [Key(name, bool, "", None) for name in names]


def _autocast(values: Values) -> Values:
    if values.get("dtype") == "fp8":
        raise UsageError(
            "precision: autocast does not support fp8: convert the model where it is built, with torchao "
            "(torchao.float8.convert_to_float8_training, pip install torchao) or Transformer Engine's "
            "fp8_autocast"
        )
    return values


def _renamed(**names: str) -> Callable[[Values], Values]:
    return lambda values: {names.get(key, key): value for key, value in values.items()}


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
    edits_of = {"default": ("compile",), "reduce-overhead": ("compile", "cuda-graph")}
    return edits_of.get(values.get("mode", "default"), ())


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


def _planned(values: Values) -> Values:
    plan = read_plan(values["plan"])
    if not plan.has_names:
        raise UsageError(
            f"{values['plan']}: its gradients have no names, by which a job finds them: "
            "make it from a run that DDP's buckets were recorded of"
        )
    return {"reductions": [asdict(reduction) for reduction in plan.reductions]}


def changes_of_plan(path: Path) -> tuple[str, ...]:
    """Return the edits that belong to a tensor plan, and the plan itself, as the user would write them.

    Raises:
        DproError: the file is not a plan.
    """
    return (*read_plan(path).edits, f"{TENSORS}:plan={quoted(path)}")


TENSORS = "tensors"
PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}  # as NCCL spells them
TYPES = ("bf16", "fp16", "fp8")  # of matmuls; fp8 is refused with a hint
OF_DDP = ("ddp", "reduction", TENSORS)  # families that need a DistributedDataParallel
CHANGES: dict[str, ChangeRow] = {
    "bucket": ChangeRow(
        "change the size of DDP's gradient buckets",
        "ddp", [_amount("mb", MAX_TIMES, MISSING)], "bucket:mb=25", _renamed(mb="bucket_cap_mb"),
    ),
    "ddp": ChangeRow(
        "change other DDP settings",
        "ddp", _flags("gradient_as_bucket_view", "static_graph", "find_unused_parameters"),
        "ddp:static_graph=true",
    ),
    "compress": ChangeRow(
        "compress gradients before they are reduced",
        "reduction",
        [
            _word("to", "fp16", "bf16"), count_key("powersgd_rank", default=None), _amount("topk", 1),
            _amount(BUDGET, 1), _word("module"),
        ],
        "compress:to=bf16", _compression,
    ),
    TENSORS: ChangeRow(
        "reduce gradients as a tensor plan says",
        TENSORS, [Key("plan", Path, "", MISSING)], "tensors:plan=plan.json", _planned,
    ),
    "local-updates": ChangeRow(
        "train each rank on its own and average parameters every few steps (post-local SGD)",
        "reduction", [count_key("every", least=2)], "local-updates:every=4", uneven=True,
    ),
    "precision": ChangeRow(
        "run the model's forward pass under autocast",
        "modules.precision", [_word("dtype", *TYPES), _amount(BUDGET, 1)], "precision:dtype=bf16", _autocast,
    ),
    "autocast": ChangeRow(
        "alias of precision",
        "modules.precision", [_word("dtype", *TYPES, default=MISSING)], "autocast:dtype=bf16", _autocast,
        edits=_precision,
    ),
    "compile": ChangeRow(
        "compile the model with torch.compile",
        "modules.compiling", [_word("mode", "default", "reduce-overhead", "max-autotune")],
        "compile", lambda values: {"mode": "default"} | values, alone=True, edits=_compiled,
    ),
    "cuda-graph": ChangeRow(
        "capture the model's launches as CUDA graphs, on GPUs",
        "modules.compiling", (), "cuda-graph", lambda _: {"backend": "cudagraphs"}, alone=True,
    ),
    "recompute": ChangeRow(
        "keep only the inputs of modules, and recompute the rest in backward",
        "modules.recompute", [_word("module", default=MISSING)], "recompute:module=layers.*",
    ),
    "prefetch": ChangeRow(
        "gather FSDP2 parameters some modules earlier",
        "modules.sharded", [count_key("ahead", default=1), _word("only", "forward", "backward")],
        "prefetch:ahead=1",
    ),
    "accumulate": ChangeRow(
        "combine several passes of the loop into one optimizer step; the last one reduces gradients",
        "accumulate", [count_key("steps", least=2, default=2)], "accumulate:steps=2",
        samples=lambda values: values["steps"],
    ),
    "batch": ChangeRow(
        "increase the batch size of DataLoaders",
        "data", [_amount("factor", 1024, 2.0, 1.01)], "batch:factor=2",
        samples=lambda values: values["factor"], passes=lambda values: values["factor"],
    ),
    "hide-input": ChangeRow(
        "return the previous batch again, so that the job never waits for input",
        "repeat", (), "hide-input", alone=True, keeps_loss=False,
    ),
    "no-sync": ChangeRow(
        "make item() return its value of the step before, without waiting for the GPU",
        "waits", (), "no-sync", alone=True,
    ),
    "no-comm": ChangeRow(
        "skip DDP's gradient reduction",
        "reduction", (), "no-comm", lambda _: {"to": "nothing"}, alone=True, keeps_loss=False,
    ),
    "algorithm": ChangeRow(
        "set the algorithm (NCCL_ALGO) or protocol (NCCL_PROTO) of NCCL's collectives",
        "environment", [_word("to", "ring", "tree"), _word("proto", *PROTOCOLS)],
        "algorithm:to=tree", _algorithm,
    ),
    "slow": ChangeRow(
        "make a rank sleep at the beginning of each step",
        "host", [count_key("rank", least=0, default=None), _amount("ms", 60_000)], "slow:rank=1,ms=20", _late,
    ),
    "workers": ChangeRow(
        "set the number of DataLoader worker processes",
        "data", [count_key("count", least=0)], "workers:count=2", _renamed(count="num_workers"),
    ),
    "dataloader": ChangeRow(
        "change the number of workers and other DataLoader settings",
        "data",
        [
            count_key("workers", least=0, default=None), count_key("prefetch_factor", default=None),
            *_flags("pin_memory", "persistent_workers"),
        ],
        "dataloader:workers=2", _renamed(workers="num_workers"), edits=_workers,
    ),
    "optimizer": ChangeRow(
        "use another implementation of the optimizer",
        "optimizers", [_word("impl", "fused", "foreach", "loop", default=MISSING)], "optimizer:impl=fused",
    ),
    "gc": ChangeRow(
        "run Python's garbage collection only every few steps, or never (0)",
        "host", [count_key("every", least=0, default=None)], "gc:every=100",
        lambda values: {"every": 0} | values, alone=True, uneven=True,
    ),
    "threads": ChangeRow(
        "set the number of PyTorch's threads",
        "host", [count_key("n")], "threads:n=1", _renamed(n="num_threads"),
    ),
}  # fmt: skip
PROBE_SUMMARIES = {
    f"compress:{PROBE}": "measure the error and time of each gradient codec, without a change",
    f"precision:{PROBE}": "measure the error of weights with fewer bits, and its effect on the loss",
}
VARIABLE, VARIABLE_EXAMPLE = "env", "env:NCCL_ALGO=Tree"
VARIABLE_SUMMARY = "set an environment variable that recordings keep"


def parse_change(text: str) -> Change:
    """Parse a change.

    Raises:
        UsageError: there is no such change or key (the message names the nearest one), or a value is invalid.
    """
    name, rest = split_edit(text)
    if name == VARIABLE:
        return _variable(text.strip(), rest)
    if name not in CHANGES:
        raise UsageError(_unknown(name))
    row, text = CHANGES[name], text.strip()
    if rest.strip() == PROBE and f"{name}:{PROBE}" in PROBE_SUMMARIES:
        return Change(text, text, f"{PROBES}{name}", {})
    given = read_values(name, rest, row.keys, row.example)
    values = {key: value for key, value in given.items() if value is not None}
    if not (values or row.alone):
        raise UsageError(f"{name} needs {' or '.join(key.name for key in row.keys)}, as in {row.example}")
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
        if not isinstance(value, Path)
    ]
    return f"{name}:{','.join(words)}" if words else name


def ensure_compatible(changes: Sequence[Change], environment: Mapping[str, str]) -> None:
    """Refuse changes that exclude each other, and variables that already have the requested value.

    Raises:
        UsageError: the message names the changes.
    """
    names = [split_edit(change.text)[0] for change in changes]
    for name in names:
        if names.count(name) > 1 and name != VARIABLE:
            raise UsageError(f"{name} is given twice: combine its keys, as in {name}:a=…,b=…")
    if sum(change.family == "reduction" for change in changes) > 1:
        raise UsageError(
            "compress, local-updates and no-comm exclude each other: DDP takes one communication hook"
        )
    if {TENSORS, "bucket"} <= {*names}:
        raise UsageError("tensors and bucket exclude each other: the plan chooses the buckets")
    hooked = next((change.text for change in changes if change.family == "reduction"), "")
    if hooked and any(map(_needs_hook, changes)):
        raise UsageError(
            f"{hooked} excludes a plan with pieces or reduce_in: DDP takes one communication hook"
        )
    if "accumulate" in names and {"local-updates", "no-comm"} & {*names}:
        raise UsageError("accumulate excludes local-updates and no-comm, which reduce no gradients")
    for change in changes:
        if change.family == "environment":
            name, value = change.arguments["name"], change.arguments["value"]
            if environment.get(name) == value:
                raise UsageError(f"{change.text}: {name} is {value} here already: there is nothing to change")


def _needs_hook(change: Change) -> bool:
    """Return whether it is a plan that changes more than which gradients are reduced together."""
    planned = change.arguments["reductions"] if change.family == TENSORS else ()
    return any(reduction["pieces"] > 1 or reduction["reduce_in"] for reduction in planned)


def kind_of_edit(text: str) -> str:
    """Return the kind of a what-if edit in the ledger; empty where it cannot be tried."""
    try:
        return parse_change(text).kind
    except DproError:  # also of a plan whose file is gone
        return ""


def is_of_ddp(text: str) -> bool:
    """Return whether trying a what-if edit changes torch's DDP, which other frameworks do not use."""
    return parse_change(text).family in OF_DDP


def _variable(text: str, rest: str) -> Change:
    name, equals, value = rest.partition("=")
    if not name or not equals:
        raise UsageError(f"{VARIABLE} needs a variable and its value, as in {VARIABLE_EXAMPLE}")
    if not kept({name: value}) or name.endswith("RANK") or name.startswith("SLURM_"):
        raise UsageError(
            f"{text}: recordings do not keep this variable; use one of CUDA, NCCL, gloo, OpenMP, PyTorch, …"
        )
    return Change(text, f"{VARIABLE}:{name}", "environment", {"name": name, "value": value})


def _unknown(name: str) -> str:
    from dpro.replay.whatif.registry import EDITS

    names = [*CHANGES, VARIABLE]
    if name in EDITS:
        return (
            f"{name} can be predicted (dpro whatif), but not applied to a job; available: {', '.join(names)}"
        )
    return f"no change {name!r}{suggest(name, names)}; there are {', '.join(names)}"


# How `dpro whatif` suggests to try its predictions.


def how_to_try(predictions: Sequence[Prediction], run: Run) -> str:
    """Return the command that applies the first prediction to the job; empty if it cannot be applied."""
    texts = [str(edit) for prediction in predictions[:1] for edit in prediction.edits]
    if not texts or not all(map(kind_of_edit, texts)):
        return ""
    if any(map(is_of_ddp, texts)) and _reduces_without_ddp(run):
        return ""
    return f"dpro try {shlex.join(texts)} -- COMMAND"


def _reduces_without_ddp(run: Run) -> bool:
    """Return whether the run shows that DeepSpeed reduces the gradients."""
    from dpro.replay.gradient_buckets import SOURCE
    from dpro.schema import BUCKETS

    return any(source.startswith(SOURCE) for source in run.table(BUCKETS, ["source"])["source"].to_list())
