"""Lines of logs as launchers, NCCL, kernels and schedulers write them, of jobs that never were."""

from __future__ import annotations

from collections.abc import Sequence

LAUNCHER = """Traceback (most recent call last):
  File "/opt/env/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/env/lib/python3.11/site-packages/torch/distributed/run.py", line 901, in main
    run(args)
  File "/opt/env/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 264, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def raised(rank: int, error: str, file: str = "train.py", line: int = 31, mark: str | None = None) -> str:
    """A traceback as PyTorch's hook writes it; with another mark before each line, as others do."""
    lines = [
        "Traceback (most recent call last):",
        f'  File "/code/{file}", line 80, in <module>',
        "    main()",
        f'  File "/code/{file}", line {line}, in main',
        "    loss = step(batch)",
        "           ^^^^^^^^^^^",
        error,
    ]
    before = f"[rank{rank}]: " if mark is None else mark
    return "".join(f"{before}{text}\n" for text in lines)


def watchdog(
    rank: int,
    sequence: int,
    enqueued: int,
    group: str = "PG ID 0 PG GUID 0(default_pg)",
    op: str = "ALLREDUCE",
) -> str:
    """What NCCL's watchdog writes of a call that took ten minutes."""
    mark = f"[rank{rank}]:[E1206 18:44:1{rank}.715298746 ProcessGroupNCCL.cpp:"
    where = f"{group} " if group else ""
    return (
        f"{mark}607] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, "
        f"OpType={op}, NumelIn=4096, NumelOut=4096, Timeout(ms)=600000) ran for 600061 milliseconds before "
        f"timing out.\n{mark}1664] [{where}Rank {rank}] Exception (either an error or timeout) detected by "
        f"watchdog at work: {sequence}, last enqueued NCCL work: {enqueued}, last completed NCCL work: "
        f"{sequence - 1}.\n"
    )


def summary(
    exits: Sequence[tuple[int, int, int]],
    host: str = "node1",
    at: str = "2026-11-20_10:00:07",
    local: int = 8,
) -> str:
    """What the elastic agent writes at the end: rank, exit code and pid; the first is the root cause."""
    blocks = []
    for number, (rank, code, pid) in enumerate(exits):
        why = "To enable traceback see: errors.html" if code > 0 else f"Signal {-code} received"
        blocks.append(
            f"[{number}]:\n  time      : {at}\n  host      : {host}\n"
            f"  rank      : {rank} (local_rank: {rank % local})\n  exitcode  : {code} (pid: {pid})\n"
            f"  error_file: <N/A>\n  traceback : {why}\n"
        )
    line = "-" * 60
    others = "".join(blocks[1:]) or "  <NO_OTHER_FAILURES>\n"
    root = f"Root Cause (first observed failure):\n{blocks[0]}"
    return f"{LAUNCHER}train.py FAILED\n{line}\nFailures:\n{others}{line}\n{root}"
