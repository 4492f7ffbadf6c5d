"""How many edits a run answers, and why it refuses the others.

python -m benchmarks.accuracy.answered [RUN …] [--json]

RUN is anything that `dpro whatif` takes; without any, the traces of `DEFAULT` in the folder that
`DPRO_TRACES` names. Each run is asked for every edit of the registry, in each way in which it can be made:
first as the search does (the candidates that the edit declares for the run), then as its help shows it, with
a rank and an operation of the run. An edit is answered if one of these is predicted with a finite interval.
Each check lists the reasons for the refused edits, for a reader to judge.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from benchmarks import TRACES, as_program
from dpro.analysis.analysis import Analysis
from dpro.cli.analysis import analyse
from dpro.errors import Unanswerable
from dpro.replay.graph import GraphError
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts, facts_of
from dpro.replay.whatif.predict import predict
from dpro.replay.whatif.registry import all_kinds, parse_edit

DEFAULT = (
    "multirank/nanogpt_h100_8r_rs_ag",
    "multirank/torchrec_v100_4r_opt4",
    "multirank/torchrec_v100_4r_a2a_ar",
    "multirank/torchrec_v100_2r_kjt",
    "multirank/hta_a100_sampled_0_1_of_128",
    "multirank/param_dlrm_v100_8r",
    "nccl_meta/mi300x_ddp_rank0of8.json.gz",
    "nccl_meta/nanogpt_h100_hook_rank0of8.json.gz",
)
# Of an edit that can be made in several ways, each way; its candidates are distinguished by their beginning.
WAYS = {"compress": ("compress:to=bf16", "compress:powersgd_rank=2", "compress:topk=0.01")}
BAR = 26


def questions() -> Iterator[tuple[str, str]]:
    """Yield each edit, or each way of making it, with an example."""
    for kind in all_kinds():
        for example in WAYS.get(kind.name, (kind.example,)):
            yield way_of(parse_edit(example)), example


def way_of(edit: Edit) -> str:
    """Return the question that an edit answers: its name, and its way where the edit has several."""
    return str(edit).partition("=")[0] if edit.name in WAYS else edit.name


def asked(facts: RunFacts, question: str, example: str) -> tuple[list[Edit], str]:
    """Return a run's candidates for an edit and the adapted example, and why there are no candidates."""
    kind, reason = type(parse_edit(example)), ""
    try:
        found = [edit for edit in kind.candidates(facts) if way_of(edit) == question]
    except (Unanswerable, GraphError) as error:
        found, reason = [], str(error)
    return [*found, parse_edit(adapted(example, facts))], reason


def adapted(example: str, facts: RunFacts) -> str:
    """Adapt an example of the help to a run: its last rank and its largest operation."""
    example = re.sub(r"(?<![a-z_])rank=\d+", f"rank={facts.ranks[-1]}", example)
    largest = re.sub(r'[,="\[\]]', "?", facts.largest_ops[0][0]) if facts.largest_ops else "*"
    return re.sub(r"name=[^,]+", f"name={largest}", example)


def answer(analysis: Analysis, facts: RunFacts, question: str, example: str) -> tuple[str, str]:
    """Return the first edit of a question that the run answers; else "" and the first reason for refusal."""
    edits, reason = asked(facts, question, example)
    for edit in edits:
        try:
            predicted = predict(facts.graph, analysis.baseline, [edit], analysis.trust)
        except (Unanswerable, GraphError) as error:
            reason = reason or str(error)
            continue
        if math.isfinite(predicted.low_ns) and math.isfinite(predicted.high_ns):
            return str(edit), ""
        reason = reason or "its interval is not bounded"
    return "", reason


def check(source: str) -> dict[str, object]:
    """Count the edits that a run answers, and give the reason for each refused one."""
    analysis = analyse(source)
    facts = facts_of(analysis.built.graph, analysis.baseline, analysis.suspects)
    answers = {name: answer(analysis, facts, name, example) for name, example in questions()}
    answered = [edit for edit, _ in answers.values() if edit]
    refused = {name: reason for name, (edit, reason) in answers.items() if not edit}
    figures = {"answered": len(answered), "edits": answered, "refused": refused}
    return {"n": len(answers), "figures": figures, "bar": BAR, "holds": len(answered) >= BAR}


def main() -> int:
    """Ask each run for every edit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="the checks as one object")
    options = parser.parse_args()
    found = {}
    for source in options.runs or [str(TRACES / name) for name in DEFAULT]:
        with redirect_stdout(sys.stderr):
            found[Path(source).name] = check(source)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, each in found.items():
        figures = each["figures"]
        assert isinstance(figures, dict)
        print(f"{name}: {figures['answered']} of {each['n']} answered (bar {BAR})")
        for edit, reason in figures["refused"].items():
            print(f"  {edit:20} {reason}")
    return 0


if __name__ == "__main__":
    as_program(main)
