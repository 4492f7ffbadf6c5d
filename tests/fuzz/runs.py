"""Runs to be damaged or asked for, each made once.

In: the folder of all inputs. Out: a run in a folder of its own, which is copied before it is changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from threading import RLock

from dpro.extensions.serving.requests import add_requests, read_requests
from dpro.ingest.importer import import_sources
from dpro.store import Manifest, write_manifest
from tests.builders import cpu_job, gpu_job
from tests.fabrics import crossing_pairs
from tests.fuzz.seeds import SEEDS
from tests.jobs import RECORD, ROOT, children, kill, script, sidecar_of, start, wait_for

SLOW_RANK = ROOT / "sample_traces" / "slow_rank"
HEALTHY = ROOT / "sample_traces" / "healthy"
_lock = RLock()


def copied(run: Path, to: Path) -> Path:
    """A copy of a run that may be changed."""
    shutil.copytree(run, to, symlinks=True)
    return to


def _once(make: Callable[[Path], None]) -> Callable[[Path], Path]:
    def made(parent: Path) -> Path:
        folder = parent / make.__name__
        with _lock:
            if not (folder / "made").exists():
                folder.mkdir()
                make(folder)
                (folder / "made").touch()
        return folder / "run"

    return made


@_once
def killed_recording(folder: Path) -> None:
    """A recording of a real job of one process, killed with what it has written."""
    body = "import time\nfor step in range(400):\n    train_step()\nopen('stepped', 'w')\ntime.sleep(600)"
    command = [*RECORD, "-o", "run", "--skip", "5", "--every", "20", "--", *script(folder, body)]
    job = start(command, folder)
    wait_for(folder / "stepped")
    kill(sidecar_of(folder / "run"))
    kill(*children(job.pid), job.pid)
    job.wait()


@_once
def in_a_fabric(folder: Path) -> None:
    """Four ranks on hosts that two leaves join."""
    crossing_pairs(folder / "run")


@_once
def on_cpus(folder: Path) -> None:
    """Three ranks that reduce on CPUs."""
    cpu_job().write(folder / "run")


@_once
def on_gpus(folder: Path) -> None:
    """Two ranks with kernels on streams."""
    gpu_job().write(folder / "run")


@_once
def in_a_pipeline(folder: Path) -> None:
    """Whole operations of two stages."""
    for rank in range(2):
        (folder / f"rank{rank}.json").write_bytes(SEEDS["pipeline timeline (Primus)"](rank, 6))
    import_sources([folder], folder / "run", jobs=1)


@_once
def served(folder: Path) -> None:
    """The requests of a server of two engines."""
    log = folder / "log.csv"
    log.write_text(
        "arrival_s,scheduled_s,first_token_s,last_token_s,prompt_tokens,output_tokens,replica\n"
        + "".join(
            f"{at / 50},{at / 50 + 0.02},{at / 50 + 0.1},{at / 50 + 0.9},{60 + at},30,{at % 2}\n"
            for at in range(80)
        )
    )
    write_manifest(folder / "run", Manifest(world_size=1, ranks=[]))
    add_requests(folder / "run", read_requests([log]))
