"""How well dpro accounts for the time of jobs that fail, and predicts what other designs of recovery give.

python benchmarks/goodput.py [--seed N] [--campaigns N] [--minutes N] [--keep FOLDER | --data FOLDER] [--json]

Campaigns are real jobs on this machine (gloo, torchrun, torch.distributed.checkpoint), time compressed: a
failure a minute. Their designs take turns; failures are SIGKILL and SIGSTOP at moments drawn from the seed.
`--json` prints one object: check → {n, median_pct, worst_pct, bar, holds}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs as a script, too

from benchmarks.campaigns.campaign import Campaign, kept_campaigns, run_campaign
from benchmarks.campaigns.compared import account_errors, life, predicted
from benchmarks.campaigns.design import DESIGNS, SHORT
from dpro.goodput.document import goodput_document
from dpro.goodput.stages import stages_of

MTBF_S = 60.0
ACCOUNT_BAR, MEDIAN_BAR, WORST_BAR = 1.0, 3.0, 8.0


def campaigns(seed: int, count: int, minutes: float, folder: Path) -> list[Campaign]:
    """Run campaigns, one after the other.

    Args:
        seed: of the first; each has its own.
        count: how many.
        minutes: of each.
        folder: where they go.
    """
    found = []
    for number in range(count):
        design = DESIGNS[number % len(DESIGNS)]
        print(f"campaign {number + 1} of {count}: {design.name}", file=sys.stderr, flush=True)
        found.append(run_campaign(design, seed + number, folder / str(number), minutes * 60, MTBF_S))
    return found


def judged(found: Sequence[Campaign]) -> dict[str, dict[str, Any]]:
    """Check → figures.

    Args:
        found: the campaigns; the first of the design `SHORT` is what others are predicted from.
    """
    lives = [life(each) for each in found]
    errors = [account_errors(each, own) for each, own in zip(found, lives, strict=True)]
    checks = {
        f"account, {name}": _figures([100 * abs(each[name]) for each in errors], ACCOUNT_BAR, ACCOUNT_BAR)
        for name in ("productive", "checkpoint")
    }
    stages = [stages_of(each) for each in lives]
    base = next(own for each, own in zip(found, lives, strict=True) if each.design == SHORT)
    in_background = [own for each, own in zip(found, stages, strict=True) if each.design.in_background]
    stall_s = in_background[0].stall_s if in_background else 0.0
    missed = []
    for campaign, own in zip(found, lives, strict=True):
        if own is base:
            continue
        measured = goodput_document(own, []).goodput
        said = predicted(base, campaign.design, campaign, stall_s)
        missed.append(100 * abs(said / measured - 1))
        print(f"{campaign.design.name}: predicted {said:.1%}, measured {measured:.1%}", file=sys.stderr)
    return checks | {"predicted from another campaign": _figures(missed, MEDIAN_BAR, WORST_BAR)}


def _figures(errors: Sequence[float], median_bar: float, worst_bar: float) -> dict[str, Any]:
    median, worst = statistics.median(errors or [0.0]), max(errors, default=0.0)
    return {
        "n": len(errors),
        "median_pct": round(median, 2),
        "worst_pct": round(worst, 2),
        "bar": f"median <= {median_bar:g}%, worst <= {worst_bar:g}%",
        "holds": median <= median_bar and worst <= worst_bar if errors else None,
    }


def main() -> None:
    """Run campaigns and print how far dpro was off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--campaigns", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--keep", type=Path, help="Keep the campaigns in this folder.")
    parser.add_argument("--data", type=Path, help="Judge the campaigns that were kept in this folder.")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        done = (
            kept_campaigns(asked.data)
            if asked.data
            else campaigns(asked.seed, asked.campaigns, asked.minutes, folder)
        )
        found = judged(done)
    if asked.json:
        print(json.dumps(found))
        return
    for check, figures in found.items():
        print(f"{check}: {figures}")


if __name__ == "__main__":
    main()
