"""The end of a recording: tables of the processes of one launcher, then the run's manifest.

Reads a launch whose job has ended and writes a run that opens, with a manifest that states which changes were
made to the job. Several launchers may share a run; each adds its ranks to the existing manifest. The manifest
is written last, and the marker is removed after it.
"""

from __future__ import annotations

import dataclasses
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
from msgspec.structs import replace

from dpro._version import __version__
from dpro.collectors.convert.process import convert_process, convert_so_far, move_process
from dpro.collectors.convert.recorded import (
    Readers,
    RecordedProcess,
    attempts,
    processes,
    unreadable,
    worker_groups,
)
from dpro.collectors.convert.retention import LATEST, keep_windows
from dpro.collectors.convert.served import write_engines
from dpro.collectors.convert.tables import convert_samples
from dpro.collectors.convert.windows import worst
from dpro.collectors.inside import records
from dpro.collectors.inside.files import (
    ACTOR,
    BUSY,
    IMPORTED,
    LACKS,
    REPLACED,
    SHOWN,
    image_folder,
)
from dpro.collectors.launch.absence import seen_in, why_no_steps
from dpro.collectors.launch.endings import ending_of_job, first_error
from dpro.collectors.launch.recording import MARKERS, RAW, Launch, ensure_mine, keep_others_out, launches
from dpro.collectors.telemetry.sampler import forget_elections
from dpro.folders import locked
from dpro.plugins import hooks_of
from dpro.schema import COUNTERS, STEPS, TABLES, WORKERS
from dpro.store import AppliedChange, Manifest, is_run, merge_counts, open_run, part_files, write_manifest
from dpro.units import NS_PER_S
from dpro.words import from_json

SOURCES = {
    "spans": "Kineto, in deep windows",
    "syncs": "Kineto, in deep windows",
    "collectives": "Kineto in deep windows, PyTorch's flight recorder otherwise; NCCL's Inspector if asked",
    "steps": "optimizer hooks",
    "buckets": "DDP logging data",
    "codecs": "compress:probe",
    "sensitivities": "precision:probe",
    "checkpoints": "torch.save, torch.load, torch.distributed.checkpoint, safetensors",
    "clock_samples": "recorder",
    "counters": "recorder; NVML, AMD SMI, /sys/class/infiniband, /sys/class/net, /proc and cgroups",
    "starts": "recorder, scheduler, the kernel",
    "start_parts": "recorder",
    "workers": "recorder, and the kernel for how processes ended",
}
CLOCKS = {
    "time": "CLOCK_REALTIME",
    "monotonic": "CLOCK_MONOTONIC_RAW",
    "windows": "CLOCK_REALTIME: Kineto's ts * 1000 + baseTimeNanoseconds",
}
MIN_TELEMETRY_GAP_S = 10  # telemetry that ends this much before the processes is incomplete
ENDED_BY_RAY = (1 << 8, signal.SIGKILL)  # wait statuses of workers that Ray ends
GROUPS = "groups"  # folder with the runs of the other worker groups of the job
ATTEMPTS = "attempts"  # folder with the runs of earlier attempts of a restarted job


def convert_waiting(launch: Launch, readers: Readers) -> None:
    """Convert the complete windows, calls and samples of a job that still runs."""
    convert_samples(launch, whole=True)
    for process in processes(launch):
        convert_so_far(launch.run, process, readers)


def finish(
    launch: Launch,
    readers: Readers,
    status: int | None,
    statuses: Mapping[int, int],
    said: Sequence[str] = (),
) -> None:
    """Turn the records of a launch into tables, and write or extend the manifest.

    Args:
        status: wait status of the job; None where unknown.
        statuses: wait statuses of its processes, by pid.
        said: warnings to add to the manifest.

    Raises:
        InputError: the recording belongs to another user, or it or the run has links; nothing was changed.
        OSError: the tables cannot be written; a later `finish` may succeed.
    """
    _ensure_mine(launch)
    if is_run(launch.run) and not launch.raw.exists():  # an earlier `finish` was killed after its last table
        launch.remove_marker()
        return
    launched_ns = int(launch.facts().get("launched_ns", -1))
    runs = list(_runs(launch))
    lost = unreadable(launch)
    warnings = [*said, *_lines(launch.raw / "log.txt")] + [
        f"{name}: not all of .raw was converted: its facts.json is damaged" for name in lost
    ]
    whole, options = not lost, launch.facts().get("options", {})
    statuses = {**statuses, **_statuses_of_actors(launch, statuses, status)}
    write_engines(launch)
    for folder, recorded, other in runs:
        for process in recorded:
            move_process(launch.run, process, folder)
        notes = []
        for process in recorded:
            doubt = f"rank {process.rank}: not all of .raw was converted"
            given = (folder, process, readers, statuses, launched_ns)
            notes.append(_note_or_warning(doubt, _convert_one, *given))
        notes.append({"warnings": [*other, *disagreement(folder)]})
        if folder == launch.run:
            notes += [{"warnings": warnings}]
            notes += [_note_or_warning("not all telemetry was converted", _sampled, launch, recorded)]
            for convert in hooks_of("recorded"):
                failed = f"{convert.__name__.replace('_', ' ')} failed"
                notes += [_note_or_warning(failed, convert, launch, recorded)]
        if launches(launch.run) == [launch]:
            _keep_windows(folder, options)
        _write_manifest(folder, _manifest(launch, folder, recorded, notes, status))
        whole = whole and all(note.get("whole", True) for note in notes)
    if whole:
        launch.remove_raw()
    launch.remove_marker()
    if options.get("keep_windows"):
        with locked(launch.run):
            if not launches(launch.run):  # the last of several launchers sees all ranks
                for folder, *_ in runs:
                    _keep_windows(folder, options)


def _runs(launch: Launch) -> Iterator[tuple[Path, list[RecordedProcess], list[str]]]:
    """Yield the runs made from a launch, its own last: folder, processes, and sentences on the other runs.

    Of several worker groups, the one with the most updates becomes the launch's own run; earlier attempts of
    a group are in folders below its run.
    """
    members_of = worker_groups(processes(launch)) or {"": []}
    groups = sorted(members_of.items(), key=lambda group: max(map(_updates, group[1]), default=0))
    several = f"the job has {len(groups)} worker groups: "
    for role, members in groups:
        is_last = role == groups[-1][0]
        folder = launch.run if is_last else launch.run / GROUPS / role
        *earlier, last = attempts(members) or [[]]
        for number, attempt in enumerate(earlier):
            yield folder / ATTEMPTS / str(number), attempt, []
        this = f"this one trains most, the others are in {GROUPS}/" if is_last else "this is one of them"
        said = [several + this] if len(groups) > 1 else []
        if earlier:
            times = f"the {'group' if len(groups) > 1 else 'job'} began {len(earlier) + 1} times"
            said.append(f"{times}: this is the last run, earlier ones are in {ATTEMPTS}/")
        yield folder, last, said


def _updates(process: RecordedProcess) -> int:
    recorded = records.read_records(process.folder / "records.bin")
    return sum(record.kind == records.UPDATE for record in recorded)


def _statuses_of_actors(launch: Launch, statuses: Mapping[int, int], status: int | None) -> dict[int, int]:
    """Return zero as wait status of the actors that Ray ended.

    Ray ends actors with exit code 1 or SIGKILL once they are not needed any more. An actor in a call may have
    failed by itself, so it is left out unless the job succeeded.
    """
    ended = [one.facts for one in processes(launch) if statuses.get(one.facts["pid"]) in ENDED_BY_RAY]
    busy = {facts["pid"]: launch.raw / f"{ACTOR}{facts['host']}-{facts['pid']}{BUSY}" for facts in ended}
    actors = [facts["pid"] for facts in ended if facts["actor"]]
    return {
        pid: 0 for pid in actors if status == 0 or (busy[pid].is_file() and busy[pid].read_bytes() == b"0")
    }


def _keep_windows(run: Path, options: Mapping[str, Any]) -> None:
    most = options.get("keep_windows")
    if isinstance(most, int) and most > 0:
        keep_windows(run, most, str(options.get("keep", LATEST)))


def _ensure_mine(launch: Launch) -> None:
    """Ensure that everything finishing changes belongs to this user and is out of reach of others.

    Raises:
        InputError: something belongs to another user, or the marker is damaged.
    """
    launch.facts()
    folders = [launch.run / name for name in (MARKERS, RAW, ATTEMPTS, GROUPS)]
    below = [f"{ATTEMPTS}/*", f"{GROUPS}/*", f"{GROUPS}/*/{ATTEMPTS}/*"]
    runs = [launch.run, *(path for within in below for path in launch.run.glob(within))]
    tables = [run / name for run in runs for name in TABLES]
    ensure_mine([launch.run.resolve()], within=False)
    ensure_mine([*folders, *tables])
    if launch.raw.exists():
        keep_others_out(launch.run, launch.raw.parent)


def _note_or_warning(doubt: str, convert: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return the result of a conversion, or a warning that it failed, so that the others still run.

    Raises:
        OSError: the tables cannot be written; a later `finish` may succeed.
    """
    try:
        return convert(*arguments)
    except OSError:
        raise
    except Exception as error:
        return {"warnings": [f"{doubt}: {type(error).__name__}: {error}"], "whole": False}


def _convert_one(
    run: Path, process: RecordedProcess, readers: Readers, statuses: Mapping[int, int], launched_ns: int
) -> dict[str, Any]:
    status = None if _recorded_again(process) else statuses.get(process.facts["pid"])
    note = convert_process(run, process, readers, status, launched_ns)
    further = [*_replaced(process), *_cut_off(process), *_lines(process.folder / LACKS)]
    return note | {"warnings": [*note["warnings"], *further]}


def _sampled(launch: Launch, recorded: Sequence[RecordedProcess]) -> dict[str, Any]:
    """Convert the samples of the node; the processes have been converted before."""
    convert_samples(launch)
    forget_elections(launch.raw.parent)
    return {"warnings": _telemetry_gap(launch, recorded)}


def _telemetry_gap(launch: Launch, recorded: Sequence[RecordedProcess]) -> list[str]:
    """Return at most one warning: that telemetry ended before the processes did."""
    sampled = part_files(launch.run, COUNTERS, f"telemetry-*-{launch.name}")
    lived = [launch.run / WORKERS.name / f"{process.part}.parquet" for process in recorded]
    sampled_ns, ended_ns = _latest_ns(sampled, "time_ns"), _latest_ns(lived, "ended_ns")
    lost_s = (ended_ns - sampled_ns) // NS_PER_S
    if sampled_ns < 0 or lost_s < MIN_TELEMETRY_GAP_S:
        return []
    last = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(sampled_ns // NS_PER_S))
    return [
        f"{launch.facts()['host']}: telemetry ends at {last} UTC, {lost_s} s before the processes do: "
        "the sampler was killed, or stalled"
    ]


def _latest_ns(parts: Iterable[Path], column: str) -> int:
    """Return the largest value of a column in existing parts; -1 for none."""
    values = [pl.read_parquet(part, columns=[column])[column].max() for part in parts if part.exists()]
    return max((value for value in values if isinstance(value, int)), default=-1)


def _recorded_again(process: RecordedProcess) -> bool:
    """Return whether the process later recorded as another program; its end is then that program's."""
    facts = process.facts
    return image_folder(process.folder.parent, facts["host"], facts["pid"], facts["image"] + 1).is_dir()


def _replaced(process: RecordedProcess) -> list[str]:
    """Return a warning if a process replaced itself by another program, and whether that was recorded."""
    path = process.folder / REPLACED
    if not path.is_file():
        return []
    lost = "recorded as a separate attempt" if _recorded_again(process) else "which was not recorded"
    command = shlex.join(from_json(path.read_bytes())["command"])
    return [f"rank {process.rank}: its process replaced itself by another program, {lost}: {command}"]


def _cut_off(process: RecordedProcess) -> list[str]:
    """Return at most one warning: files left incomplete when the process was killed or the disk full."""
    cut = {path.name.partition(".")[0] for path in process.folder.glob("*.tmp")}
    names = sorted(name for name in cut if name and not name.startswith(SHOWN))  # "": not its file
    lost = f"rank {process.rank}: incomplete, since the process was killed or the disk was full: "
    return [lost + ", ".join(names)] if names else []


def _manifest(
    launch: Launch,
    run: Path,
    recorded: list[RecordedProcess],
    notes: list[dict[str, Any]],
    status: int | None,
) -> Manifest:
    warnings = [warning for note in notes for warning in note.get("warnings", [])]
    ended, error = ending_of_job(launch, status), first_error(launch.raw)
    unrecorded = ""
    if not any((run / STEPS.name / f"{process.part}.parquet").exists() for process in recorded):
        written = [records.read_records(process.folder / "records.bin") for process in recorded]
        updates = [sum(record.kind == records.UPDATE for record in of_process) for of_process in written]
        imported, absence = (launch.raw / IMPORTED).exists(), seen_in(launch.raw)
        unrecorded = why_no_steps(updates, imported, absence, ended.failure(error))
        unconverted = [note["warnings"][0] for note in notes if not note.get("whole", True)]
        unrecorded = unconverted[0] if unconverted else unrecorded
        seen = [] if recorded else absence
        warnings += seen or [unrecorded]
    facts = [process.facts for process in recorded]
    versions = {name: version for note in notes for name, version in note.get("versions", {}).items()}
    launched: Mapping[str, Any] = launch.facts()
    return Manifest(
        world_size=max((fact["world_size"] for fact in facts), default=0),
        ranks=[process.rank for process in recorded],
        created_by=f"dpro record {__version__}",
        command=list(map(str, launched.get("command", []))),
        hosts=_distinct(fact["host"] for fact in facts),
        gpus=_distinct(fact["gpu_name"] for fact in facts if fact["gpu_name"]),
        versions=versions | {"dpro": __version__},
        clocks=dict(CLOCKS),
        sources=dict(SOURCES),
        environment=_common(fact.get("environment", {}) for fact in facts),
        options=launched.get("options", {}),
        exit_status=ended.status,
        error=error,
        unrecorded=unrecorded,
        warnings=_distinct(warnings),
        skipped=merge_counts(count for note in notes for count in note.get("skipped", [])),
        windows=worst(note.get("windows", {}) for note in notes),
        applied=[change for process in recorded for change in applied(process, launched.get("options", {}))],
    )


def _join_manifests(earlier: Manifest, added: Manifest) -> Manifest:
    """Combine the manifests of several launchers of a run; the exit status is that of the first to fail."""
    statuses = (earlier.exit_status, added.exit_status)
    failed = [status for status in statuses if status]
    twice = sorted({*earlier.ranks} & {*added.ranks})
    mixed = [
        f"several launchers recorded rank {', '.join(map(str, twice))}: several jobs, or attempts "
        "of one job, are mixed here; record each into a separate folder"
    ]
    return dataclasses.replace(
        earlier,
        world_size=max(earlier.world_size, added.world_size),
        ranks=sorted({*earlier.ranks, *added.ranks}),
        hosts=_distinct([*earlier.hosts, *added.hosts]),
        gpus=_distinct([*earlier.gpus, *added.gpus]),
        versions=added.versions | earlier.versions,
        environment=_common([earlier.environment, added.environment]) if earlier.ranks else added.environment,
        exit_status=failed[0] if failed else None if None in statuses else 0,
        warnings=_distinct([*(mixed if twice else []), *earlier.warnings, *added.warnings]),
        skipped=merge_counts([earlier.skipped, added.skipped]),
        windows=worst([earlier.windows, added.windows]),
        applied=[*earlier.applied, *added.applied],
        error=earlier.error or added.error,
        unrecorded=earlier.unrecorded and added.unrecorded,
    )


def _write_manifest(run: Path, added: Manifest) -> None:
    """Write the manifest of one launch, or add it to that of the other launches."""
    run.mkdir(parents=True, exist_ok=True)
    with locked(run):  # launchers may end at the same time
        earlier = open_run(run).manifest if is_run(run) else None
        write_manifest(run, added if earlier is None else _join_manifests(earlier, added))


def _common(environments: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the variables with one value in all environments; per-rank ones, such as `RANK`, drop out."""
    first, *others = [dict(environment) for environment in environments] or [{}]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


# Whether the ranks of a job complete steps at the same rate.

MAX_STEP_RATIO = 1.5  # factor between step counts that counts as disagreement, beyond
STEP_SLACK = 2  # steps that may be cut off at the two ends of the compared period


def disagreement(run: Path) -> list[str]:
    """Return at most one warning: that ranks differ in the steps completed in their shared period.

    Args:
        run: a folder with the parts of table `steps`.
    """
    parts = part_files(run, STEPS)
    if not parts:
        return []
    steps = pl.concat([pl.read_parquet(part, columns=["rank", "start_ns", "duration_ns"]) for part in parts])
    steps = steps.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    alive = steps.group_by("rank").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    shared = (pl.col("start_ns") >= alive["start_ns"].max()) & (pl.col("end_ns") <= alive["end_ns"].min())
    counts = steps.group_by("rank").agg(shared.sum().cast(pl.Int64).alias("count")).sort("count", "rank")
    if counts.is_empty():
        return []
    (fewer_rank, fewer), (more_rank, more) = counts.row(0), counts.row(-1)
    if more <= MAX_STEP_RATIO * fewer + STEP_SLACK:
        return []
    return [
        f"rank {more_rank} completed {more} steps while rank {fewer_rank} completed {fewer}: if they "
        "train together, they count steps differently; name the step with --step"
    ]


# Which of the requested changes were made to the job; a change that a process did not report was not made.

UNREPORTED = "the process ended before it could report whether the change was made"


def applied(process: RecordedProcess, options: Mapping[str, Any]) -> list[AppliedChange]:
    """Return the outcome of each requested change in a process that has ended.

    Returns:
        A record per change, which was either applied or refused.
    """
    said = {change.edit: change for change in _reported_changes(process)}
    outcomes = []
    for change in options.get("apply", []):
        outcome = said.get(change["edit"], AppliedChange(change["edit"], process.rank, [], []))
        outcomes.append(
            outcome if outcome.applied or outcome.refused else replace(outcome, refused=[UNREPORTED])
        )
    return outcomes


def refused_so_far(launch: Launch) -> Iterator[str]:
    """Yield why changes could not be made in a running job so far: `rank 0: bucket:mb=1: …`."""
    for process in processes(launch):
        for change in _reported_changes(process):
            for reason in change.refused:
                yield f"rank {process.rank}: {change.edit}: {reason}"


def _reported_changes(process: RecordedProcess) -> list[AppliedChange]:
    with suppress(OSError, ValueError, TypeError):
        said = from_json((process.folder / "applied.json").read_bytes())
        return msgspec.convert([{**change, "rank": process.rank} for change in said], list[AppliedChange])
    return []
