"""Registry of all edits, by family; makes an edit from its text, and the text that lists all edits.

Takes what the user typed; returns an edit, or raises one line that names the nearest existing one.

Each edit declares its keys, help and documentation itself. A new edit is a class in the module of its family
and its name in `FAMILIES`, or among the edits of an extension: the parser, the command's help and
`docs/reference/edits.md` follow. Modules and classes are listed as text, and an edit is imported on first
use, since importing all of them takes as long as a prediction.
`python -m dpro.replay.whatif.registry docs/reference/edits.md` writes the generated part of that page again;
a test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from dpro.errors import DproError, UsageError
from dpro.plugins import installed, load, places
from dpro.replay.whatif.edit import EFFORTS, Edit
from dpro.replay.whatif.grammar import (
    Key,
    KnownChange,
    keys_of,
    make,
    number,
    read_values,
    split_edit,
    values_of,
)
from dpro.words import suggest

C = TypeVar("C")  # server or recovery that a change applies to

FAMILIES: dict[str, dict[str, str]] = {
    "Selected work": {
        "scale": "selected_work:Scale",
        "remove": "selected_work:Remove",
        "replace": "selected_work:Replace",
    },
    "Ranks": {
        "heal": "heal:Heal",
        "slow": "selected_work:Slow",
        "drop": "selected_work:Drop",
    },
    "Host": {
        "no-launch": "host:NoLaunch",
        "free-host": "host:FreeHost",
        "cuda-graph": "cuda_graph:CudaGraph",
        "cpu": "host:Cpu",
        "no-sync": "host:NoSync",
        "hide-input": "training_loop:HideInput",
        "workers": "training_loop:Workers",
        "gc": "training_loop:Garbage",
    },
    "Fusion": {
        "optimizer": "kernels:Optimizer",
        "compile": "kernels:Compile",
    },
    "Precision": {"precision": "kernels:Precision"},
    "Devices": {"device": "device:Device"},
    "Memory for time": {
        "accumulate": "scaling:Accumulate",
        "recompute": "scaling:Recompute",
        "batch": "scaling:Batch",
    },
    "Parallelism": {"balance": "balance:Balance"},  # the extension `plan` adds the others
    "Communication": {
        "network": "communication:Network",
        "delay": "communication:Delay",
        "no-comm": "communication:NoCommunication",
        "algorithm": "communication:Algorithm",
        "coalesce": "coalescing:Coalesce",
        "prefetch": "synchronisation:Prefetch",
    },
    "Fabric": {},  # kept for its position: the extension `fabric` adds the edits
    "Gradients": {
        "bucket": "gradients:Bucket",
        "priority": "gradients:Priority",
        "compress": "gradients:Compress",
        "reduce-last": "synchronisation:ReduceLast",
        "local-updates": "synchronisation:LocalUpdates",
        "overlap": "synchronisation:Overlap",
    },
}
for _extension in installed().extensions.values():
    for _family, _edits in _extension.edits.items():
        FAMILIES[_family] = FAMILIES.get(_family, {}) | dict(_edits)
FAMILIES = {family: edits for family, edits in FAMILIES.items() if edits}
EDITS = {name: place for family in FAMILIES.values() for name, place in family.items()}

MAX_NAMED = 20  # changes listed in an error


def kind_named(name: str) -> type[Edit]:
    """Return the class of an edit, importing it on first use.

    Raises:
        KeyError: there is no edit of that name.
    """
    place = EDITS[name]
    kind: type[Edit] = load(place if "." in place else f"dpro.replay.whatif.edits.{place}")
    return kind


def all_kinds() -> list[type[Edit]]:
    """Return the classes of all edits, in the order of the families."""
    return list(map(kind_named, EDITS))


def parse_edit(text: str) -> Edit:
    """Make an edit from its text.

    Raises:
        UsageError: no such edit or key (with the nearest one), or an invalid value.
    """
    name, rest = split_edit(text)
    if name not in EDITS:
        raise no_change(name, EDITS, "edit")
    kind = kind_named(name)
    edit = make(kind, values_of(name, rest, keys_of(kind), kind.example), name)
    assert isinstance(edit, Edit)
    return edit


def changes_by_command() -> dict[str, Mapping[str, KnownChange[Any]]]:
    """Return the changes of recoveries and servers, which have no graph, by predicting command and by name.

    Commands that lack a dependency (the extra `replay`) are left out.
    """
    changes = {}
    for command, place in places("changes").items():
        with suppress(ImportError, DproError):
            changes[command] = load(place)
    return changes


def apply_change(before: C, text: str, changes: Mapping[str, KnownChange[C]]) -> C:
    """Apply a change to a recovery or a server.

    Args:
        text: as an edit is written.
        changes: available ones, by name.

    Raises:
        UsageError: there is no such change, or a value is invalid.
    """
    name, rest = split_edit(text)
    if name not in changes:
        raise no_change(name, changes, "change")
    change = changes[name]
    return change.apply(before, read_values(name, rest, change.keys, change.example))


LIST_HAS_ALL = "`dpro whatif --list` has all"


def no_change(name: str, there_are: Collection[str], what: str) -> UsageError:
    """Return the error for an unknown change, with the command that predicts it, or the nearest known change.

    Args:
        there_are: names of the changes that the command does predict.
        what: its word for them.
    """
    if name == "layout":
        return UsageError("layouts are ranked by `dpro plan RUN --gpus N --keep tp=4`, not by an edit")
    examples = {name: ("whatif", kind_named(name).example)} if name in EDITS else {}
    for command, changes in changes_by_command().items():
        examples |= {other: (command, change.example) for other, change in changes.items()}
    if name in examples:
        command, example = examples[name]
        return UsageError(f"{name!r} is predicted by another command: dpro {command} RUN --edit {example}")
    meant = suggest(name, [*there_are, *examples, *EDITS])
    few = len(there_are) <= MAX_NAMED
    all_of_them = f"there are {', '.join(there_are)}" if few else LIST_HAS_ALL
    return UsageError(f"no {what} {name!r}{meant}; {all_of_them}")


BEGIN, END = "<!-- edits: generated -->\n", "<!-- end of edits -->\n"


def help_rows() -> list[tuple[str, str]]:
    """Return (example, summary, marked if unproven) of every edit, in the order of the families."""
    return [(edit.example, _summary(edit)) for edit in all_kinds()]


def _summary(edit: type[Edit]) -> str:
    return f"{edit.summary} (unproven)" if edit.is_advice and not edit.proof else edit.summary


def list_text() -> str:
    """List all edits with their keys, for a terminal."""
    lines = []
    for family, names in FAMILIES.items():
        lines.append(family)
        for edit in map(kind_named, names):
            lines += [f"  {edit.name}: {_summary(edit)}", f"      --edit '{edit.example}'"]
            lines += [f"      {key.name}={_default(key)}  {key.help}" for key in own_keys(edit)]
            lines += ["      and a selection"] if _selects(edit) else []
        lines.append("")
    lines.append("A selection: work that meets all given conditions. Patterns are shell patterns.")
    lines += [f"      {key.name}=  {_help(key)}" for key in _keys_of_selections().values()]
    for command, changes in changes_by_command().items():
        lines += ["", f"Changes of dpro {command}"]
        for name, change in changes.items():
            lines += [f"  {name}: {change.doc.partition('. ')[0]}", f"      --edit '{change.example}'"]
            lines += [f"      {key.name}={_default(key)}  {key.help}" for key in change.keys]
    return "\n".join(lines)


def markdown() -> str:
    """Return the page about all edits."""
    lines = []
    for family, names in FAMILIES.items():
        lines += [f"## {family}", ""]
        for edit in map(kind_named, names):
            lines += [f"### `{edit.name}`: {edit.summary}", "", f"`--edit '{edit.example}'`", ""]
            lines += [f"- `{key.name}={_default(key)}`: {_help(key)}" for key in own_keys(edit)]
            lines += ["- the keys of a selection, as below"] if _selects(edit) else []
            lines += [f"- needs {edit.needs}", f"- assumes that {edit.assumes}"]
            lines += [f"- source: {edit.source}", f"- {proof_of(edit)}"]
            lines += [f"- in the training: {edit.training}"] if edit.training else []
            lines += [f"- for real ({EFFORTS[edit.effort]}): {parse_edit(edit.example).how()}", ""]
    lines += ["## Selections", ""]
    lines += ["| key | selects |", "|---|---|"]
    lines += [f"| `{key.name}=` | {_help(key)} |" for key in _keys_of_selections().values()]
    for command, changes in changes_by_command().items():
        lines += ["", f"## `dpro {command}`", "", "| change | does | source |", "|---|---|---|"]
        lines += [f"| `{change.example}` | {change.doc} | {change.source} |" for change in changes.values()]
    return "\n".join(lines) + "\n"


def proof_of(edit: type[Edit]) -> str:
    """Describe the recordings before and after such a change."""
    if edit.proof:
        return f"proven by jobs recorded before and after: {edit.proof}"
    return (
        "unproven: no job was recorded before and after such a change"
        if edit.is_advice
        else "an upper bound or hypothetical"
    )


def own_keys(edit: type[Edit]) -> list[Key]:
    """Return the keys of an edit without those of its selection."""
    others = _keys_of_selections() if _selects(edit) else {}
    return [key for name, key in keys_of(edit).items() if name not in others]


def _selects(edit: type[Edit]) -> bool:
    return _keys_of_selections().keys() <= keys_of(edit).keys()


def _keys_of_selections() -> dict[str, Key]:
    from dpro.replay.whatif.graph_ops.selected import NodeSelection  # completion of words does not need it

    return keys_of(NodeSelection)


def _help(key: Key) -> str:
    return f"{key.help} ({', '.join(key.choices)})" if key.choices else key.help


def _default(key: Key) -> str:
    if key.required or key.default is None:
        return "…"
    return number(key.default) if key.type is float else str(key.default)


def generate(page: str) -> str:
    """Return a page with the part between its two markers generated again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(generate(path.read_text()))
