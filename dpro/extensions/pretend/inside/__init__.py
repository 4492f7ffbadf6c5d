"""One process as a rank of a larger job: its collectives return at once, with made-up answers.

Reads `pretend` of the configuration, and `RANK` of the environment. Records what any rank does, and writes
`pretendedNNNN.json`, the collective calls of a deep window. Loaded only where `--pretend-ranks` asks for it.
Here the job is changed on purpose; a call that cannot be answered ends the process with one line that names
it.
"""

from __future__ import annotations

from _dpro_inside_the_job.recorder import Recorder

FIRST = True  # installed before other probes: they see the process as one of many ranks


def install(recorder: Recorder) -> None:
    """Make this process a rank of a larger job."""
    from .groups import pretend

    pretend(recorder)
