"""The part of `dpro diagnose` that is about jobs that stand still: the verdict, how it came, what to do.

In: a run. Out: text or JSON about what hangs; nothing, where the run is to be searched for what is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpro.cli.output import console, finding_document, print_json
from dpro.cli.watch import told_while_it_ran

if TYPE_CHECKING:
    from dpro.detect.findings import Finding
    from dpro.store import Run

_VERDICTS = {
    "hang.host": "{who}: its host code is stuck",
    "hang.device": "{who}: its GPU does not finish what its peers finished",
    "hang.comm": "{who}: all came and nobody gets through, be it the network or the group itself",
    "hang.mismatch": "{who}: calls that do not fit those of the others; the program is wrong, no hardware",
    "dead.rank": "{who}: the process is gone",
}
_ADVICE = {
    "hang.host": "see what {who} does: `py-spy dump --pid PID` for its stacks, `ps -o stat,wchan -p PID` "
    "(T is stopped, D waits for a disk or a driver){where}",
    "hang.device": "look for errors of its GPU (`dmesg | grep -i xid`, `nvidia-smi -q`) before it is used "
    "again{where}",
    "hang.comm": "check the links between these ranks (NCCL_DEBUG=INFO, error counters of the network cards) "
    "and try nccl-tests on their hosts",
    "hang.mismatch": "compare the code that {who} ran with that of its peers; TORCH_DISTRIBUTED_DEBUG=DETAIL "
    "names the call that differs",
    "dead.rank": "read the end of its log; `dmesg` tells of the kernel's out-of-memory killer{where}",
}
_UNSURE = 0.6  # below this confidence the verdict is one of several that the dumps allow


def say_what_hangs(run: Run, as_json: bool) -> bool:
    """Print what hangs in a run, if anything does or the run can tell nothing else.

    Args:
        run: the run.
        as_json: print one object.

    Returns:
        Whether anything was printed.
    """
    from dpro.detect.hang.find import find_hangs
    from dpro.detect.hang.records import read_records
    from dpro.schema import COLLECTIVES, SPANS, STEPS

    findings = find_hangs(read_records(run))
    rows = run.rows()
    if not findings and (rows[SPANS.name] or rows[STEPS.name] or not rows[COLLECTIVES.name]):
        return False
    unknown = _not_known(run)
    if as_json:
        print_json(_document(run, findings, unknown))
    else:
        _print(run, findings, unknown)
    return True


def _not_known(run: Run) -> list[str]:
    """What of the job is not in the run, one line each."""
    from dpro.detect.hang.words import ranks_in_words

    missing = run.manifest.missing_ranks
    lines = [warning for warning in run.manifest.warnings if warning.startswith("left out: ")]
    return [*([f"what {ranks_in_words(missing)} did: no dump of theirs"] if missing else []), *lines]


def _document(run: Run, findings: list[Finding], unknown: list[str]) -> dict[str, Any]:
    return {
        "run": run.label,
        "findings": [finding_document(finding, None) for finding in findings],
        "healthy": not findings and not unknown,
        "answerable": True,
        "reasons": unknown,
        "while_it_ran": told_while_it_ran(run),
    }


def _print(run: Run, findings: list[Finding], unknown: list[str]) -> None:
    out = console()
    if not findings:
        out.print("Nothing hangs that these calls can show; what is slow they do not tell.")
    for finding in findings:
        who = _who(finding)
        verdict = _VERDICTS[finding.class_].format(who=who)
        if finding.confidence < _UNSURE:
            verdict = f"{who}: the others wait for it, and its dump would tell why"
            if finding.class_ == "hang.mismatch":
                verdict = f"{who}: their calls do not fit each other, and which is wrong cannot be told"
        out.print(f"{finding.class_}: {verdict} (confidence {finding.confidence:.2f})")
        for line in finding.evidence:
            out.print(f"  - {line}")
        advice = _ADVICE[finding.class_].format(who=who, where=_where(run, finding))
        out.print(f"  do: {advice}")
    for reason in unknown:
        out.print(f"  not known: {reason}")


def _who(finding: Finding) -> str:
    words = {"rank": "rank", "ranks": "ranks", "group": "group", "pair": "pair"}[finding.component_kind]
    return f"{words} {finding.component_id}"


def _where(run: Run, finding: Finding) -> str:
    """Host and process of the ranks, where the run knows them."""
    import polars as pl

    from dpro.schema import WORKERS

    workers = run.table(WORKERS).filter(pl.col("rank").is_in(list(finding.ranks)) & (pl.col("pid") > 0))
    known = [
        f"rank {rank}: pid {pid} on {host}"
        for rank, pid, host in workers.select("rank", "pid", "host").iter_rows()
    ]
    return f" ({'; '.join(known)})" if known else ""
