"""Answer of `dpro attach` about a job that dpro does not record.

Takes a process that asks a daemon whether to profile; makes a run of the Kineto files that the job writes.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from dpro.cli.output import stderr_console
from dpro.collectors.attach import run_of
from dpro.documents import Document
from dpro.extensions.dynolog.daemon import listens, profile
from dpro.ingest.importer import import_sources


class ProfileDocument(Document, frozen=True, kw_only=True):
    """A run made from the profile of a job that dpro does not record.

    Attributes:
        run: the run directory.
        ranks: ranks in the run.
        warnings: warnings of the importer.
    """

    run: str
    ranks: list[int]
    warnings: list[str]


def profile_unrecorded(
    pid: int, steps: int, run: Path, timeout_s: float
) -> tuple[ProfileDocument, str] | None:
    """Profile some steps of a job and import them.

    Returns:
        The answer, and a line for people; None where dpro records the job, or it asks no daemon.

    Raises:
        InputError: there is no such process, or it wrote no profile.
    """
    if run_of(pid) is not None or not listens(pid):
        return None
    with TemporaryDirectory(prefix="dpro-attach-") as folder:
        with stderr_console().status(f"waiting for {steps} steps"):
            traces = profile(pid, steps, Path(folder), timeout_s)
        manifest = import_sources(traces, run)
    document = ProfileDocument(run=str(run), ranks=manifest.ranks, warnings=manifest.warnings)
    return document, f"ranks {', '.join(map(str, manifest.ranks))} are in {run}"
