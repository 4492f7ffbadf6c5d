"""How the jobs of campaigns save and recover, and what that is as a change to another's recovery."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CampaignDesign:
    """How a job saves and recovers.

    Attributes:
        name: of the design.
        every: steps from one checkpoint to the next.
        in_background: whether it saves while it trains.
        detect_s: how long a rank that stands still is left alone.
        repair_s: how long it waits for its host after a failure.
        edits: the same as changes to the recovery of `SHORT`.
    """

    name: str
    every: int
    in_background: bool
    detect_s: float
    repair_s: float
    edits: tuple[str, ...]


STEP_S, SAVE_S = 0.25, 1.0
SHORT = CampaignDesign("short interval", 20, False, 3.0, 0.0, ())
DESIGNS = (
    SHORT,
    CampaignDesign("long interval", 120, False, 3.0, 0.0, ("checkpoint:every=120",)),
    CampaignDesign("in the background", 20, True, 3.0, 0.0, ("async:stall={stall}",)),
    CampaignDesign("slow detection", 20, False, 15.0, 0.0, ("detect:s={detect}",)),
    CampaignDesign("no spare", 20, False, 3.0, 12.0, ("spares:hosts=0,repair={repair}",)),
)
