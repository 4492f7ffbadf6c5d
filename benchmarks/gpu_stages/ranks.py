"""Two ranks on one GPU with a fault each, and jobs that recording must not break: dpro's findings.

Ranks use NCCL where it allows two on one GPU, else gloo on tensors of the GPU; the first check that needs to
know finds out, and reports it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from gpu_stages.check import JOBS as FOLDER
from gpu_stages.check import TORCHRUN, Bench, Check, supports

BACKEND = "backend.txt"
OPEN = 0.5  # confidence where two causes are possible


def two_ranks(bench: Bench, backend: str, *arguments: object) -> list[str]:
    """Return the command of a job of two ranks."""
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
    """Return nccl if two ranks work on one GPU, else gloo; found out once per call of the benchmark."""
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
    """Record a job with a slow rank, or none, and check the blamed rank and class."""
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


def blamed(
    bench: Bench,
    run: Path,
    expected: tuple[str, ...],
    backend: str,
    may_be_open: bool = False,
    **figures: object,
) -> None:
    """Compare the findings of a run with the fault of rank 1, if any.

    Args:
        may_be_open: whether the recording cannot show the fault; then findings of low confidence are right.
    """
    said = bench.ask("diagnose", run, limit_s=90)
    findings = [(each["class"], each["ranks"], each["confidence"]) for each in said["findings"]]
    info = bench.ask("info", run)
    right = not findings
    if expected:
        right = bool(findings) and findings[0][0] in expected and findings[0][1] == [1]
    if may_be_open:
        right = right or (bool(findings) and all(confidence <= OPEN for _, _, confidence in findings))
    bar = f"{' or '.join(expected)} of rank 1 first{', or nothing for sure' * may_be_open}"
    bench.say(
        "finding", findings=[f"{name} of {ranks} ({sure:.2f})" for name, ranks, sure in findings[:3]],
        notes=said.get("notes"), backend=backend, steps=info.get("steps"), windows=info.get("windows"),
        collectives=info["rows"].get("collectives"), warnings=info.get("warnings"),
        skipped=info.get("skipped"), **figures,
        bar=bar if expected else "nothing is found", holds=right,
    )  # fmt: skip


def hang(bench: Bench, fault: str, expected: tuple[str, ...], *options: str) -> None:
    """End a job in which a rank hangs, and check that the recording shows the rank and the class."""
    backend = backend_of(bench)
    command = two_ranks(bench, backend, "--fault", fault, "--end-after-s", 14)
    run, done = bench.record("run", command, ["--every", 1000, *options], 75)
    bench.keep(run)
    # Without NCCL's times, a device that never reached a call looks like one that waits in it.
    may_be_open = fault == "spin" and "--nccl-timing" not in options
    blamed(bench, run, expected, backend, may_be_open, exit_code=done.code, wall_s=done.wall_s)


def capture(bench: Bench, warmups: int) -> None:
    """Capture a whole step while windows are due and dumps are made; check that the job is not affected."""
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
    """Record a job whose own torch.profiler has a warm-up phase; check that its traces are complete."""
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


def torn_down(bench: Bench) -> None:
    """Check that a job ends if CUPTI is torn down after a window or profiler that ends with the job.

    Kineto tears CUPTI down within the next call of CUDA, and there is none.
    """
    variables = {"TEARDOWN_CUPTI": 1}
    own = bench.job("scheduled.py")
    window = bench.job("scheduled.py", "--no-profiler", "--steps", 16)  # ends within a window
    done = bench.run(own, 25, variables)
    bench.say("the user's profiler, not recorded", exit_code=done.code, wall_s=done.wall_s)
    for name, command in (("the user's profiler", own), ("a window", window)):
        run, done = bench.record(
            "run", command, ["--skip", 3, "--every", 6, "--window-steps", 2], 40, variables
        )
        info = bench.ask("info", run)
        bench.say(
            f"{name}, recorded", exit_code=done.code, wall_s=done.wall_s, windows=info.get("windows"),
            warnings=info.get("warnings"), bar="the job ends with 0", holds=done.code == 0,
        )  # fmt: skip


def held(bench: Bench, *words: str) -> None:
    """Check that a job that drops its privileges, or has another profiler at CUPTI, is not affected."""
    command = bench.job("held.py", "--steps", bench.few(120, 60), *words)
    plain = bench.run(command, 60).ensure().last_json()
    for options in (["--skip", 2, "--every", 15, "--window-steps", 2], ["--no-windows"]):
        run, done = bench.record("run", command, options, 60)
        info = bench.ask("info", run)
        bench.say(
            f"recorded with {' '.join(map(str, options))}", exit_code=done.code, plain=plain,
            said=done.stdout[-400:], stderr=done.stderr[-400:], steps=info.get("steps"),
            windows=info.get("windows"), warnings=info.get("warnings"), skipped=info.get("skipped"),
            bar="exit code and output as without recording",
            holds=done.code == 0 and done.last_json() == plain,
        )  # fmt: skip


def many_windows(bench: Bench) -> None:
    """Record a hundred windows in one process, and check that later ones have the kernels of the first."""
    import polars as pl

    from dpro.schema import SPANS, STEPS
    from dpro.store import open_run

    windows = bench.few(100, 4)
    command = bench.job("scheduled.py", "--no-profiler", "--steps", 6 * windows + 10)
    options = ["--skip", 3, "--every", 6, "--window-steps", 2]
    run, done = bench.record("run", command, options, 90)
    done.ensure()
    warnings = bench.ask("info", run).get("warnings")
    bench.keep(run)
    steps = open_run(run).table(STEPS).filter(pl.col("window") >= 0)
    spans = open_run(run).table(SPANS).sort("start_ns")
    work = spans.filter(pl.col("kind") == ("cpu_op" if bench.dry else "kernel"))
    begins = steps.sort("start_ns").select("start_ns", "window")
    placed = work.join_asof(begins, on="start_ns").drop_nulls("window")
    whole = steps.group_by("window").len().filter(pl.col("len") == 2)  # the job's end cuts the last window
    placed = placed.join(whole, on="window", how="semi").sort("start_ns")
    windows_seen = placed.group_by("window").agg(
        kernels=pl.len(), first_us=pl.col("duration_ns").first() / 1e3,
        names=pl.col("name").sort().str.join(";").hash(),
    ).sort("window")  # fmt: skip
    usual = placed.group_by("name").agg(usual_ns=pl.col("duration_ns").median())
    long = placed.join(usual, on="name").filter(pl.col("duration_ns") > 20 * pl.col("usual_ns").clip(1000))
    counts = windows_seen["kernels"]
    same = int((windows_seen["names"] == windows_seen["names"].mode()[0]).sum())
    bench.say(
        "windows", n=windows_seen.height, steps=steps.height, kernels_fewest=counts.min(),
        kernels_median=counts.median(), kernels_most=counts.max(), with_the_usual_kernels=same,
        first_kernel_us=[windows_seen["first_us"].min(), windows_seen["first_us"].median(),
                         windows_seen["first_us"].max()],
        kernels_of_no_length=int((placed["duration_ns"] <= 0).sum()),
        twenty_times_longer_than_usual=long.height,
        windows_of_those=long["window"].unique().to_list()[:20],
        warnings=warnings,
        bar="each window has the kernels of the others, none of them without length or 20 times too long",
        holds=same == windows_seen.height and not long.height and windows_seen.height >= 0.9 * windows,
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
    _slow("slow-gpu-timed", "slow-gpu", TIMED, GPU),
    _slow("slow-gpu-calls", "slow-gpu", ALWAYS, GPU),
    _capture(3),
    _capture(6),
    Check("ranks", "torn-down", "does a job whose last window tears CUPTI down end?", torn_down, 110),
    Check("ranks", "profiler-schedule", "does the user's profiler with a warm-up live beside windows?",
          scheduled, 150),
    Check("ranks", "privileges-dropped", "does a job that becomes another user live beside windows?",
          lambda bench: held(bench, "--drop-privileges"), 110),
    Check("ranks", "cupti-held", "does a job whose CUPTI is taken live beside windows?",
          lambda bench: held(bench, "--hold-cupti"), 110),
    Check("ranks", "many-windows", "are a hundred windows in one process like each other?",
          many_windows, 150),
    _slow("healthy", "none", WINDOWS, ()),
    _slow("slow-host-windows", "slow-host", WINDOWS, HOST),
    _slow("slow-gpu-windows", "slow-gpu", WINDOWS, GPU),
    Check("ranks", "hang-stop", "a rank is stopped: is it named?",
          functools.partial(hang, fault="stop", expected=("hang.host", "hang.rank")), 100),
    Check("ranks", "hang-spin", "a kernel does not end: is its rank named?",
          functools.partial(hang, fault="spin", expected=("hang.device", "hang.rank")), 100),
    Check("ranks", "hang-spin-timed", "a kernel does not end, with --nccl-timing: is its rank named?",
          lambda bench: hang(bench, "spin", ("hang.device", "hang.rank"), "--nccl-timing"), 100),
    _slow("slow-host-calls", "slow-host", ALWAYS, HOST),
    _capture(5),
    _capture(11),
)  # fmt: skip
