"""How the jobs of campaigns save and recover, and each design as a change to another's recovery."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CampaignDesign:
    """How a job saves and recovers.

    Attributes:
        name: of the design.
        every: steps from one checkpoint to the next.
        in_background: whether it saves while it trains.
        detect_s: how long a stopped rank goes undetected.
        hosts: of the job, a torchrun each.
        least: hosts that suffice to continue while one is away.
        repair_s: how long a failed host is away.
        edits: this design as changes to the recovery of `SHORT`.
    """

    name: str
    every: int
    in_background: bool
    detect_s: float
    hosts: int
    least: int
    repair_s: float
    edits: tuple[str, ...]


STEP_S, SAVE_S = 0.25, 1.0
# torchrun with two hosts: seconds between keep-alives, how many may be missing, and how long it waits for
# more hosts once there are enough.
KEEP_ALIVE_S, KEEP_ALIVE_TIMES, LAST_CALL_S = 1, 5, 4

SHORT = CampaignDesign("short interval", 20, False, 3.0, 1, 1, 0.0, ())
DESIGNS = (
    SHORT,
    CampaignDesign("long interval", 120, False, 3.0, 1, 1, 0.0, ("checkpoint:every=120",)),
    CampaignDesign("in the background", 20, True, 3.0, 1, 1, 0.0, ("async:stall={stall}",)),
    CampaignDesign("slow detection", 20, False, 15.0, 1, 1, 0.0, ("detect:s={detect}",)),
    CampaignDesign(
        "no spare", 20, False, 3.0, 2, 2, 12.0, ("spares:hosts=0,repair={repair}",),
    ),
    CampaignDesign(
        "one replica fewer", 20, False, 3.0, 2, 1, 30.0,
        ("hosts:count=2", "smaller:replicas=2,repair={repair},wait={wait},slower=1"),
    ),
)  # fmt: skip
