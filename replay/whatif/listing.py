"""All edits with their keys, for the command's help and for `docs/reference/edits.md`.

In: the registry. Out: text. `python -m dpro.replay.whatif.listing docs/reference/edits.md` writes the
generated part of the page again; a test holds the two together.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dpro.replay.whatif.edit import EFFORTS, Edit
from dpro.replay.whatif.grammar import Key, keys_of, number
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.registry import FAMILIES, all_kinds, kind_named, parse_edit

BEGIN, END = "<!-- edits: generated -->\n", "<!-- end of edits -->\n"


def help_rows() -> list[tuple[str, str]]:
    """(example, what it does, and whether it is unproven) of every edit, in the order of the families."""
    return [(edit.example, _summary(edit)) for edit in all_kinds()]


def _summary(edit: type[Edit]) -> str:
    return f"{edit.summary} (unproven)" if edit.is_advice and not edit.proof else edit.summary


def list_text() -> str:
    """All edits with their keys, for a terminal."""
    lines = []
    for family, names in FAMILIES.items():
        lines.append(family)
        for edit in map(kind_named, names):
            lines += [f"  {edit.name}: {_summary(edit)}", f"      --edit '{edit.example}'"]
            lines += [f"      {key.name}={_default(key)}  {key.help}" for key in own_keys(edit)]
            lines += ["      and a selection"] if _selects(edit) else []
        lines.append("")
    lines.append("A selection: conditions that hold together. Patterns are shell patterns.")
    lines += [f"      {key.name}=  {_help(key)}" for key in keys_of(NodeSelection).values()]
    return "\n".join(lines)


def markdown() -> str:
    """All edits, for the page about them."""
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
    lines += [f"| `{key.name}=` | {_help(key)} |" for key in keys_of(NodeSelection).values()]
    return "\n".join(lines) + "\n"


def proof_of(edit: type[Edit]) -> str:
    """What recordings before and after such a change there are, in words."""
    if edit.proof:
        return f"proven by jobs recorded before and after: {edit.proof}"
    return "unproven: no job was recorded before and after" if edit.is_advice else "a bound or supposition"


def own_keys(edit: type[Edit]) -> list[Key]:
    """The keys of an edit without those of its selection."""
    others = keys_of(NodeSelection) if _selects(edit) else {}
    return [key for name, key in keys_of(edit).items() if name not in others]


def _selects(edit: type[Edit]) -> bool:
    return keys_of(NodeSelection).keys() <= keys_of(edit).keys()


def _help(key: Key) -> str:
    return f"{key.help} ({', '.join(key.choices)})" if key.choices else key.help


def _default(key: Key) -> str:
    if key.required or key.default is None:
        return "…"
    return number(key.default) if key.type is float else str(key.default)


def generate(page: str) -> str:
    """A page with the part between its two marks made again."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(generate(path.read_text()))
