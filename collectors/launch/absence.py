"""Sentences that explain why nothing, or no step, was recorded.

Inspects a running job from outside, through what the kernel exposes of a process: command line, initial
environment, mapped files, and whether dpro and the run are visible to it, which they may not be in a
container. For a job that has ended, uses what the recording left. Returns one sentence per reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dpro.collectors.launch.recording import COPY

OLDEST_TORCH = (2, 6)  # oldest version that is tested
_LOADING = (2, 5)  # first version that loads entry points
_NEEDED = ".".join(map(str, OLDEST_TORCH))
ABSENCE = "absence.txt"  # in the folder of a launch: reasons that were seen while the job ran
LINKS = 40  # links followed on one path; the kernel has the same limit
_TORCH = re.compile(r"(/\S.*/torch)/lib/libtorch_cpu\.so")
_VERSION = re.compile(r"__version__ = '(\d+)\.(\d+)")


def reasons(job: int, inject: str | Path, raw: Path) -> dict[str, int]:
    """Return why processes of a job that have imported torch do not record.

    Args:
        inject: the name on `PYTHONPATH` by which the recorder finds this launch.

    Returns:
        The first pid for each reason; empty where the recorder is in all of them.
    """
    first_pids: dict[str, int] = {}
    for pid in _tree(job):
        with suppress(OSError):  # it has ended, or is another user's
            torch = _TORCH.search(Path(f"/proc/{pid}/maps").read_text(errors="replace"))
            reason = reason_of(pid, Path(torch[1]), inject, raw) if torch else None
            if reason:
                first_pids.setdefault(reason, pid)
    return first_pids


def in_words(first_pids: Mapping[str, int]) -> list[str]:
    """Word reasons as sentences, one per reason."""
    return [
        f"process {pid} imported torch but was not recorded: {reason}" for reason, pid in first_pids.items()
    ]


def seen_in(raw: Path) -> list[str]:
    """Return the reasons that were seen while a job ran, in words."""
    path = raw / ABSENCE
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def why_no_steps(updates: Sequence[int], imported: bool, seen: Sequence[str], failure: str) -> str:
    """Word why a job that has ended left no step.

    Args:
        updates: number of updates recorded by each process.
        imported: whether some process imported torch with the recorder in it.
        seen: reasons why processes could not record, as seen from outside.
        failure: how the job failed, such as `exit code 1: ValueError: no (train.py:7)`; empty if it did not.
    """
    failed = f"the job failed ({failure})" if failure else ""
    if not updates and seen:
        return f"{failed + ' and ' if failed else ''}nothing was recorded: {seen[0]}"
    if not updates and not imported:
        if failed:
            return f"{failed} before any of its processes was seen to import torch: nothing was recorded"
        return (
            f"no process of the job was seen to import torch {_NEEDED} or later: nothing was recorded "
            "(`python -E`, `python -I` and TORCH_DEVICE_BACKEND_AUTOLOAD=0 keep the recorder out)"
        )
    if max(updates, default=0) == 0:
        if failed:
            return f"{failed} before its first step ended"
        if not updates:
            return (
                "the job imported torch, but no process created a process group, ran an optimizer step "
                "or called a recognised model: nothing was recorded"
            )
        return (
            "no step of the job ended: no optimizer ran, and no recognised model was called; if a step "
            "is something else, name it with --step"
        )
    alone = "a step is timed from the end of the previous step, so a single step has no duration"
    return f"{failed} after its first step: {alone}" if failed else f"the job ran a single step: {alone}"


def reason_of(pid: int, torch: Path, inject: str | Path, raw: Path) -> str | None:
    """Return why a process that has loaded torch is not recorded; None where nothing explains it.

    Raises:
        OSError: the process has ended, or cannot be inspected.
    """
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    environment = dict(variable.partition(b"=")[::2] for variable in variables)
    ignoring = sorted(set("EI") & flags_of(words))
    if ignoring:
        return f"`python -{ignoring[0]}` ignores PYTHONPATH, which loads the recorder"
    if os.fsencode(inject) not in environment.get(b"PYTHONPATH", b"").split(os.fsencode(os.pathsep)):
        return "it was started with its own PYTHONPATH, without the folder that loads the recorder"
    if environment.get(b"TORCH_DEVICE_BACKEND_AUTOLOAD") == b"0":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables the recorder"
    match = re.search(r"^Uid:\s+\d+\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if (int(match[1]) if match else -1) != os.geteuid():
        return "it runs as another user than `dpro record`, and recordings are private to their user"
    with suppress(PermissionError):  # only the user of a process may look into its folders
        if hidden := _hidden(pid, Path(inject).parent, raw):
            return hidden
    version = _VERSION.search(seen_by(pid, torch / "version.py").read_text())
    if version and tuple(map(int, version.groups())) < _LOADING:
        return f"its torch is {'.'.join(version.groups())}, and the recorder needs {_NEEDED} or newer"
    return None


def _hidden(pid: int, code: Path, raw: Path) -> str:
    """Word which parts of the recorder a process cannot see, as in a container; empty if it sees all."""
    has_code, has_run = seen_by(pid, code).is_dir(), seen_by(pid, raw).is_dir()
    copied = (raw / COPY).is_dir()
    if has_run and (has_code or copied):
        return ""
    lacking = [] if has_code or copied else [f"dpro's installation ({code.parent})"]
    lacking += [] if has_run else [f"the run folder ({raw.parents[1]})"]
    without = f"it runs in a container without {' and '.join(lacking)}: mount that there under the same path"
    elsewhere = ", or record into a folder whose parents no other user can rename: then a copy is enough"
    return without if has_code or copied else f"{without}{elsewhere}"


def seen_by(pid: int, path: Path) -> Path:
    """Return the path under /proc at which a process sees `path`, with links resolved from its own root.

    Raises:
        PermissionError: this user may not look into it.
    """
    root, left, reached, links = Path(f"/proc/{pid}/root"), list(path.parts[1:]), Path("/"), 0
    os.stat(root)
    while left:
        name = left.pop(0)
        here = reached / name if name != ".." else reached.parent
        link = root / here.relative_to("/")
        if name != ".." and link.is_symlink() and links < LINKS:
            links += 1
            target = Path(os.readlink(link))
            left = [*target.parts[target.is_absolute() :], *left]
            reached = Path("/") if target.is_absolute() else reached
        else:
            reached = here
    return root / reached.relative_to("/")


def flags_of(words: list[str]) -> set[str]:
    """Return the single-letter options of the interpreter; stops at `-c`, `-m` or the script."""
    flags: set[str] = set()
    for word in words[1:]:
        if not word.startswith("-") or word.startswith("--"):
            break
        flags |= set(re.split("[cmXW]", word[1:])[0])
        if re.search("[cm]", word[1:]):
            break
    return flags


def _tree(root: int) -> Iterator[int]:
    """Yield the pids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    pids = [root]
    while pids:
        pid = pids.pop()
        yield pid
        pids += children.get(pid, [])
