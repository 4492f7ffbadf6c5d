"""Whether the tools of `dpro mcp` answer users' questions on real traces.

python -m benchmarks.questions [--traces FOLDER] [--verdicts FILE] [--list] [--json]

Each question has an answer that dpro did not compute: counted in the events of the files themselves,
published with a trace, or given by an expert (`benchmarks.verdicts`). It is put to the tools, not to a model,
in at most three calls. `--list` prints each question with another answer. `--json` prints one object: check →
{n, right_pct, bar, holds}.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.verdicts import TRACES, VERDICTS, experts_of
from dpro.errors import DproError
from dpro.extensions.mcp.tools import call

MAX_CALLS = 3
BAR = 95.0  # %
NEAR = 0.01  # largest relative error of a time or a ratio
MIN_MS = 0.02  # error of times that is always accepted
COUNTED = (  # jobs whose collectives are NCCL's own kernels
    "multirank/nanogpt_h100_8r_rs_ag",
    "multirank/torchrec_v100_4r_a2a_ar",
    "multirank/torchrec_v100_4r_opt4",
    "multirank/torchrec_v100_4r_sleep1s_rank2",
)
EVERYTHING = 100_000  # kernels

Answers = dict[str, dict[str, Any]]  # by tool
Calls = tuple[tuple[str, dict[str, Any]], ...]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Question:
    """A question with a known answer.

    Attributes:
        kind: under which it is counted.
        text: as a person would ask it.
        source: the trace, below the folder.
        calls: tools and their arguments, without the run.
        read: extracts the answer from those of the tools.
        truth: right answers; any of them will do.
    """

    kind: str
    text: str
    source: str
    calls: Calls
    read: Callable[[Answers], Any]
    truth: tuple[Any, ...]


# The truth, counted in the files.


def ranks_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the complete spans of each rank's file."""
    ranks = {}
    for path in sorted(folder.glob("*.json*")):
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        name = re.search(r"rank-?_?(\d+)", path.name)
        rank = trace.get("distributedInfo", {}).get("rank", int(name[1]) if name else -1)
        ranks[rank] = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    return ranks


def steps_of(events: Sequence[dict[str, Any]]) -> dict[int, Interval]:
    """Return the begin and end of each step of a rank, in us."""
    return {
        int(event["name"].partition("#")[2]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation"
    }


def on_gpu(events: Sequence[dict[str, Any]], step: Interval) -> Interval:
    """Return begin and end of a step on a GPU, in us: the ends of the work launched before its bounds."""
    called = {event["args"]["correlation"]: event["ts"] for event in events if event["cat"] == "cuda_runtime"}
    work = [
        (called[event["args"]["correlation"]], event["ts"] + event["dur"])
        for event in events
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") and event["args"]["correlation"] in called
    ]
    begin, end = (max([at, *(done for call, done in work if call < at)]) for at in step)
    return begin, end


def union_us(intervals: Sequence[Interval]) -> float:
    """Return how long at least one of the intervals lasts."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return covered


def within(
    events: Sequence[dict[str, Any]], step: Interval, wanted: Callable[[dict[str, Any]], bool]
) -> list[Interval]:
    """Return the parts of wanted events that are within a step."""
    begin, end = step
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if wanted(event)]
    return [(max(start, begin), min(stop, end)) for start, stop in spans if start < end and stop > begin]


def is_computing(event: dict[str, Any]) -> bool:
    """Return whether an event is a kernel that moves no data between ranks."""
    return event["cat"] == "kernel" and not is_moving(event)


def is_moving(event: dict[str, Any]) -> bool:
    """Return whether an event is one of NCCL's kernels."""
    return event["cat"] == "kernel" and "nccl" in event["name"].lower()


# The questions.


INFO: Calls = (("info", {}),)
REPORT: Calls = (("report", {"top": EVERYTHING}),)


def counted_questions(source: str, folder: Path) -> Iterator[Question]:
    """Yield questions whose answers can be counted in the files of a job."""
    ranks = ranks_of(folder)
    steps = steps_of(ranks[max(ranks)])
    counts: dict[str, tuple[Callable[[Answers], Any], int]] = {
        "How many ranks were recorded?": (lambda answers: len(answers["info"]["ranks"]), len(ranks)),
        "How many steps were recorded?": (lambda answers: answers["info"]["steps"], len(steps)),
    }
    for text, (read, truth) in counts.items():
        yield Question("count", text, source, INFO, read, (truth,))
    yield from kernel_questions(source, ranks)
    yield from step_questions(source, max(ranks), ranks[max(ranks)])


def kernel_questions(source: str, ranks: dict[int, list[dict[str, Any]]]) -> Iterator[Question]:
    """Ask for the kernel that takes longest, its time, and how often it runs."""
    totals_ms: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    for events in ranks.values():
        for event in events:
            if event["cat"] == "kernel":
                totals_ms[event["name"]] += event["dur"] / 1000
                times[event["name"]] += 1
    longest = max(totals_ms, key=totals_ms.__getitem__)
    asked: dict[str, tuple[Callable[[Answers], Any], Any]] = {
        "Which kernel takes most of the GPUs' time?": (
            lambda answers: answers["report"]["kernels"][0]["name"],
            longest,
        ),
        f"How long does {longest} take, ms?": (partial(of_kernel, longest, "total_ms"), totals_ms[longest]),
        f"How often does {longest} run?": (partial(of_kernel, longest, "count"), times[longest]),
    }
    for text, (read, truth) in asked.items():
        yield Question("kernels", text, source, REPORT, read, (truth,))


def step_questions(source: str, rank: int, events: Sequence[dict[str, Any]]) -> Iterator[Question]:
    """Ask for the parts of a step of a rank."""
    steps = steps_of(events)
    step = sorted(steps)[len(steps) // 2]
    begin, end = interval = on_gpu(events, steps[step])
    computing, moving = (within(events, interval, wanted) for wanted in (is_computing, is_moving))
    parts = {
        "duration_ms": ("How long is", end - begin),
        "compute_ms": ("How long does anything compute in", union_us(computing)),
        "exposed_comm_ms": (
            "How long are data moved while nothing computes in",
            union_us([*moving, *computing]) - union_us(computing),
        ),
    }
    for part, (asked, us) in parts.items():
        text = f"{asked} step {step} of rank {rank}, ms?"
        yield Question("steps", text, source, REPORT, partial(part_of, part, step, rank), (us / 1000,))


def of_kernel(name: str, key: str, answers: Answers) -> Any:
    """Return a value of a kernel from a report."""
    return next(entry[key] for entry in answers["report"]["kernels"] if entry["name"] == name)


def part_of(part: str, step: int, rank: int, answers: Answers) -> float:
    """Return a part of a step of a rank from a report."""
    rows = answers["report"]["steps"]
    return float(next(row[part] for row in rows if (row["step"], row["rank"]) == (step, rank)))


def ranks_of_findings(answers: Answers) -> list[int]:
    """Return the ranks that a diagnosis names."""
    return sorted({rank for finding in answers["diagnose"]["findings"] for rank in finding["ranks"]})


def expert_questions(expert: dict[str, Any]) -> Iterator[Question]:
    """Yield the questions that an expert answered for a trace."""
    ask = partial(Question, source=expert["source"], calls=(("explain", {}),))
    limits = (expert["limit"], *expert.get("limit_also_acceptable", ()))
    yield ask(
        "verdict",
        "What limits this job?",
        read=lambda a: (a["explain"]["limit"] or {}).get("kind"),
        truth=limits,
    )
    yield ask(
        "verdict",
        "Which ranks are at fault?",
        read=lambda a: a["explain"]["faulty_ranks"],
        truth=(sorted(expert["faulty_ranks"]),),
    )


def published_questions(folder: Path) -> Iterator[Question]:
    """Yield the question for the stragglers of two production traces, whose ranks were published."""
    for name, fault in (("AR", [0]), ("ST", [6, 7])):
        source = f"straggler_parquet/trace-{name}.parquet"
        if (folder / source).is_file():
            text = "Which ranks make the others wait?"
            yield Question("published", text, source, (("diagnose", {}),), ranks_of_findings, (fault,))


def questions(traces: Path, verdicts: Path) -> list[Question]:
    """Return all questions."""
    sources = [source for source in COUNTED if (traces / source).is_dir()]
    counted = [question for source in sources for question in counted_questions(source, traces / source)]
    of_expert = [question for expert in experts_of(verdicts) for question in expert_questions(expert)]
    return [*counted, *of_expert, *published_questions(traces)]


def is_right(said: Any, truth: Any) -> bool:
    """Return whether an answer is the truth; near it, where the truth is a float."""
    if isinstance(truth, float):
        return isinstance(said, int | float) and abs(said - truth) <= max(NEAR * abs(truth), MIN_MS)
    return bool(said == truth)


def answered(question: Question, traces: Path) -> Any:
    """Put a question to the tools; return the answer, or a text that says why there is none."""
    if len(question.calls) > MAX_CALLS:
        return f"{len(question.calls)} calls"
    try:
        answers = {
            tool: msgspec.to_builtins(
                call(tool, {"run": str(traces / question.source), **arguments}, [traces])
            )
            for tool, arguments in question.calls
        }
        return question.read(answers)
    except (DproError, StopIteration, KeyError, IndexError) as error:
        return f"no answer: {error}"


def percent(right: Sequence[bool]) -> float | None:
    """Return the share of true values, in percent; None without values."""
    return round(100 * sum(right) / len(right), 1) if right else None


def main() -> int:
    """Ask all questions and print the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--verdicts", type=Path, default=VERDICTS)
    parser.add_argument("--list", action="store_true", help="print what is answered otherwise")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    right: dict[str, list[bool]] = defaultdict(list)
    for question in questions(options.traces, options.verdicts):
        said = answered(question, options.traces)
        right[question.kind].append(any(is_right(said, truth) for truth in question.truth))
        if options.list and not right[question.kind][-1]:
            truth = " or ".join(map(str, question.truth))
            print(f"{question.source}: {question.text} {said}, not {truth}", file=sys.stderr)
    every = [one for of_kind in right.values() for one in of_kind]
    checks = {kind: {"n": len(of_kind), "right_pct": percent(of_kind)} for kind, of_kind in right.items()}
    share = percent(every)
    checks["all"] = {"n": len(every), "right_pct": share, "bar": BAR, "holds": bool(share) and share >= BAR}
    if options.json:
        print(json.dumps(checks))
    else:
        for kind, figures in checks.items():
            bar = f" (bar {figures['bar']:g}%)" if "bar" in figures else ""
            print(f"{kind:10} {figures['n']:3}  {figures['right_pct']}% right{bar}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
