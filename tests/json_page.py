"""The page of what `--json` prints, `docs/json.md`, generated from the documents: `make schema` writes it.

In: the document of each command, and its JSON schema. Out: one Markdown table per command, and one per part.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from msgspec import Struct

from dpro.analysis.answers.info import ContentsDocument, InfoDocument
from dpro.analysis.answers.replay import ReplayDocument
from dpro.analysis.answers.report import ReportFilesDocument
from dpro.analysis.answers.whatif import ParetoDocument, SensitivityDocument, WhatIfDocument
from dpro.collectors.attach import (
    AttachDocument,
    StacksDocument,
    SwitchDocument,
    WindowDocument,
)
from dpro.detect.findings_log import WatchDocument
from dpro.documents import schema_of
from dpro.extensions.check.answer import CheckDocument
from dpro.extensions.doctor.readiness import ReadinessDocument
from dpro.extensions.dynolog.profiled import ProfileDocument
from dpro.extensions.export.drawing import ExportDocument
from dpro.extensions.export.otlp import SentDocument
from dpro.extensions.fabric.answer import TopologyDocument
from dpro.extensions.goodput.document import GoodputDocument
from dpro.extensions.history.database import HistoryDocument
from dpro.extensions.memory.answer import MemoryChangeDocument, MemoryDocument
from dpro.extensions.plan.answer import PlanDocument
from dpro.extensions.query.document import QueryDocument, TablesDocument
from dpro.extensions.scrub.scrub import ScrubDocument
from dpro.extensions.serving.answers import ServerDiagnosis, ServerReport
from dpro.extensions.serving.document import ServingDocument
from dpro.extensions.tensors.answer import MadePlanDocument
from dpro.extensions.trial.documents import LedgerDocument, TryDocument
from dpro.extensions.trial.probes import ProbeDocument
from dpro.ingest.shards import ShardDocument
from dpro.replay.difference import DifferenceDocument
from dpro.verdict.report import DemoDocument
from dpro.verdict.verdict import ComparedRuns, Explanation

COMMANDS: dict[str, type[Struct]] = {
    "dpro demo": DemoDocument,
    "dpro import SOURCE... -o RUN": ContentsDocument,
    "dpro import SOURCE... -o RUN --shard I/N": ShardDocument,
    "dpro explain RUN": Explanation,
    "dpro info RUN": InfoDocument,
    "dpro report RUN": ServerReport,
    "dpro report RUN --html FILE": ReportFilesDocument,
    "dpro query RUN": TablesDocument,
    "dpro query RUN SQL": QueryDocument,
    "dpro memory SNAPSHOT": MemoryDocument,
    "dpro memory SNAPSHOT OTHER": MemoryChangeDocument,
    "dpro replay RUN": ReplayDocument,
    "dpro whatif RUN": WhatIfDocument,
    "dpro whatif RUN --sensitivity": SensitivityDocument,
    "dpro whatif RUN --pareto": ParetoDocument,
    "dpro whatif RUN --make-plan FILE": MadePlanDocument,
    "dpro plan --model CONFIG --gpus N": PlanDocument,
    "dpro topology FILE | RUN": TopologyDocument,
    "dpro diagnose RUN": ServerDiagnosis,
    "dpro goodput RUN...": GoodputDocument,
    "dpro serving RUN": ServingDocument,
    "dpro diff A B": DifferenceDocument,
    "dpro diff A B C...": ComparedRuns,
    "dpro export RUN --perfetto FILE": ExportDocument,
    "dpro export RUN --otlp URL": SentDocument,
    "dpro scrub RUN COPY": ScrubDocument,
    "dpro try EDIT... -- COMMAND...": TryDocument,
    "dpro try EDIT:probe -- COMMAND...": ProbeDocument,
    "dpro ledger": LedgerDocument,
    "dpro watch RUN": WatchDocument,
    "dpro attach RUN -o COPY": AttachDocument,
    "dpro attach RUN --steps K": WindowDocument,
    "dpro attach RUN --stacks": StacksDocument,
    "dpro attach RUN --off": SwitchDocument,
    "dpro attach --pid PID --steps K -o RUN": ProfileDocument,
    "dpro check --hosts LIST": CheckDocument,
    "dpro history": HistoryDocument,
    "dpro doctor": ReadinessDocument,
}
HEAD = """---
search:
  boost: 0.1
---

# What `--json` prints

A command with `--json` prints one object on standard output; `dpro watch` prints one per line. This page is
generated from the documents of the commands (`make schema`); [`dpro mcp`](mcp.md) gives those about runs to
agents, with their schemas.
New keys may come; those that are here keep their meaning as long as `schema_version` is the same. A key that
is *optional* may be absent.
"""
TYPES = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def page() -> str:
    """Return the whole page."""
    parts: dict[str, dict[str, Any]] = {}
    sections = [HEAD]
    for command, kind in COMMANDS.items():
        schema = schema_of(kind)
        parts |= schema.get("$defs", {})
        sections.append(_section(f"`{command} --json`", schema))
    sections.append("## Parts\n")
    sections += [_section(_plain(name), parts[name], level="###") for name in sorted(parts, key=_plain)]
    return "\n".join(sections)


def _section(title: str, schema: dict[str, Any], level: str = "##") -> str:
    required = schema.get("required", [])
    rows = [
        f"| `{name}` | {_type(declared)}"
        + ("" if name in required or name == "schema_version" else ", *optional*")
        + f" | {_escaped(declared.get('description', ''))} |"
        for name, declared in schema["properties"].items()
    ]
    head = ["| key | type | meaning |", "|---|---|---|"]
    return "\n".join([f"{level} {title}\n", f"{schema['description']}\n", *head, *rows, ""])


def _type(declared: dict[str, Any]) -> str:
    if "anyOf" in declared:
        return " or ".join(map(_type, declared["anyOf"]))
    if "$ref" in declared:
        name = _plain(declared["$ref"].rpartition("/")[2])
        return f"[{name}](#{name.replace(' ', '-')})"
    if declared.get("type") == "array":
        if "prefixItems" in declared:
            return f"[{', '.join(map(_type, declared['prefixItems']))}]"
        return f"list of {_type(declared['items'])}"
    if declared.get("type") == "object":
        values = declared.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    return TYPES[declared["type"]]


def _plain(name: str) -> str:
    """Return the name of a part in words: `LinkCostDocument` is `link cost`."""
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name)
    return words.removesuffix(" document").strip()


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
