"""One process as a rank of a larger job: its collectives return at once, with answers of its own.

In: `pretend` of the configuration, and `RANK` of the environment. Out: what any rank records, and
`pretendedNNNN.json`, the collective calls of a deep window. Loaded only where `--pretend-ranks` asks for it.
Here the job is changed on purpose; what cannot be answered ends the process with one line that names the
call.
"""

from __future__ import annotations

from ..recorder import Recorder

FIRST = True  # of all probes: the others see the job as one of many ranks


def install(recorder: Recorder) -> None:
    """Make this process a rank of a larger job."""
    from .groups import pretend

    pretend(recorder)
