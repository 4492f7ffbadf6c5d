"""Two ranks on one GPU with a fault each, and jobs that recording must not break: what dpro says of them.

Where NCCL allows it the ranks talk by NCCL, else by gloo on tensors of the GPU; the first check to come
finds out, and says so.
"""

from __future__ import annotations

import functools
from pathlib import Path

from gpu_stages.check import JOBS as FOLDER
from gpu_stages.check import TORCHRUN, Bench, Check, supports

BACKEND = "backend.txt"


def two_ranks(bench: Bench, backend: str, *arguments: object) -> list[str]:
    """The command of a job of two ranks."""
    command = [*TORCHRUN, "2", "--master-port", str(_free_port()), str(FOLDER / "two_ranks.py")]
    command += ["--device", bench.device, "--backend", backend, *map(str, arguments)]
    return [*command, *(["--tiny"] if bench.dry else [])]


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def backend_of(bench: Bench) -> str:
    """NCCL where two ranks get through on one GPU, else gloo; found out once per call of the benchmark."""
    known = bench.results.parents[1] / BACKEND
    if not known.exists():
        name = "gloo"
        if not bench.dry:
            done = bench.run(two_ranks(bench, "nccl", "--steps", 5), 45, {"NCCL_DEBUG": "WARN"})
            name = "nccl" if done.code == 0 else "gloo"
            said = "" if done.code == 0 else (done.stdout + done.stderr)[-800:]
            bench.say("nccl with two ranks on one GPU", works=done.code == 0, said=said)
        known.write_text(name, encoding="utf-8")
    return known.read_text(encoding="utf-8")


def slow(bench: Bench, fault: str, options: list[str], expected: tuple[str, ...]) -> None:
    """A rank that is slow, or none: is it blamed, and for the right reason?"""
    lacking = [option for option in options if option.startswith("--no-w") or option.startswith("--nccl-t")]
    lacking = [option for option in lacking if not supports(option)]
    if lacking:
        bench.say(fault, skipped=f"this dpro has no {' and no '.join(lacking)}")
        return
    backend = backend_of(bench)
    steps = bench.few(160, 40)
    command = two_ranks(bench, backend, "--fault", fault, "--steps", steps)
    run, done = bench.record("run", command, options, 90)
    job = done.ensure().last_json()
    bench.keep(run)
    blamed(bench, run, expected, backend, step_ms=job["step_ms"])


def blamed(bench: Bench, run: Path, expected: tuple[str, ...], backend: str, **figures: object) -> None:
    """Hold the findings of a run against what was wrong with rank 1, if anything."""
    said = bench.ask("diagnose", run, limit_s=90)
    findings = [(each["class"], each["ranks"], each["confidence"]) for each in said["findings"]]
    info = bench.ask("info", run)
    right = not findings
    if expected:
        right = bool(findings) and findings[0][0] in expected and findings[0][1] == [1]
    bench.say(
        "finding", findings=[f"{name} of {ranks} ({sure:.2f})" for name, ranks, sure in findings[:3]],
        notes=said.get("notes"), backend=backend, steps=info.get("steps"), windows=info.get("windows"),
        collectives=info["rows"].get("collectives"), warnings=info.get("warnings"),
        skipped=info.get("skipped"), **figures,
        bar=f"{' or '.join(expected)} of rank 1 first" if expected else "nothing is found", holds=right,
    )  # fmt: skip


def hang(bench: Bench, fault: str, expected: tuple[str, ...]) -> None:
    """A rank that stands still: the job is ended, and its recording says which and why."""
    backend = backend_of(bench)
    command = two_ranks(bench, backend, "--fault", fault, "--end-after-s", 14)
    run, done = bench.record("run", command, ["--every", 1000], 75)
    bench.keep(run)
    blamed(bench, run, expected, backend, exit_code=done.code, wall_s=done.wall_s)


def capture(bench: Bench, warmups: int) -> None:
    """A whole step captured while windows are due and dumps are made: does the job go on as it would?"""
    command = bench.job("captured.py", "--warmups", warmups, "--steps", bench.few(400, 20))
    plain = bench.run(command, 60).ensure().last_json()
    options = ["--skip", 2, "--every", 4, "--window-steps", 2]
    run, done = bench.record("run", command, options, 60)
    same = done.code == 0 and done.last_json() == plain
    info = bench.ask("info", run)
    bench.say(
        f"{warmups} warm-ups", exit_code=done.code, said=done.stdout, stderr=done.stderr[-400:],
        steps=info.get("steps"), windows=info.get("windows"), warnings=info.get("warnings"),
        skipped=info.get("skipped"), bar="exit code and output as without recording", holds=same,
    )  # fmt: skip


def scheduled(bench: Bench) -> None:
    """The user's own torch.profiler with a warm-up phase, beside windows of ours."""
    command = bench.job("scheduled.py")
    plain = bench.run(command, 60).ensure().last_json()
    for skip in (2, 3, 4, 5):
        options = ["--skip", skip, "--every", 7, "--window-steps", 2]
        run, done = bench.record(f"run-{skip}", command, options, 60)
        mine = done.last_json() if done.code == 0 else {}
        info = bench.ask("info", run)
        bench.say(
            f"first window after {skip} steps", exit_code=done.code, plain=plain, recorded=mine,
            stderr=done.stderr[-400:], windows=info.get("windows"), no_window=info.get("no_window"),
            bar="the user's traces are all there, and the job ends with 0",
            holds=done.code == 0 and mine.get("traces") == plain["traces"],
        )  # fmt: skip


WINDOWS = ["--every", "30", "--window-steps", "3"]
ALWAYS = ["--no-windows"]
TIMED = ["--no-windows", "--nccl-timing"]
HOST = ("slow.host",)
GPU = ("slow.compute",)


def _slow(name: str, fault: str, options: list[str], expected: tuple[str, ...]) -> Check:
    run = functools.partial(slow, fault=fault, options=options, expected=expected)
    asks = f"{fault}, recorded with {' '.join(options)}: what does diagnose say?"
    return Check("ranks", name, asks, run, 110)


def _capture(warmups: int) -> Check:
    asks = f"does a whole-step capture after {warmups} warm-ups live through recording?"
    return Check("ranks", f"capture-{warmups}", asks, functools.partial(capture, warmups=warmups), 60)


CHECKS = (
    _capture(3),
    _capture(6),
    Check("ranks", "profiler-schedule", "does the user's profiler with a warm-up live beside windows?",
          scheduled, 150),
    _slow("healthy", "none", WINDOWS, ()),
    _slow("slow-host-windows", "slow-host", WINDOWS, HOST),
    _slow("slow-gpu-windows", "slow-gpu", WINDOWS, GPU),
    Check("ranks", "hang-stop", "a rank is stopped: is it named?",
          functools.partial(hang, fault="stop", expected=("hang.host", "hang.rank")), 100),
    Check("ranks", "hang-spin", "a kernel does not end: is its rank named?",
          functools.partial(hang, fault="spin", expected=("hang.device", "hang.rank")), 100),
    _slow("slow-host-calls", "slow-host", ALWAYS, HOST),
    _slow("slow-gpu-timed", "slow-gpu", TIMED, GPU),
    _slow("slow-gpu-calls", "slow-gpu", ALWAYS, GPU),
    _capture(5),
    _capture(11),
)  # fmt: skip
