"""How well dpro accounts for the time of jobs that fail, and predicts other designs of recovery.

python benchmarks/goodput.py [--seed N] [--campaigns N] [--minutes N] [--keep FOLDER | --data FOLDER] [--json]

Campaigns are real jobs on this machine (gloo, torchrun, torch.distributed.checkpoint), compressed in time: a
failure a minute. Their designs take turns; failures are SIGKILL and SIGSTOP at moments drawn from the seed.
Simulations are also compared with closed forms and, with a folder of published tables (`--data`), with
measurements of others. `--json` prints one object: check → {n, figures, bar, holds}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it also runs as a script

from benchmarks import as_program
from benchmarks.campaigns.campaign import Campaign, kept_campaigns, run_campaign
from benchmarks.campaigns.compared import account_errors, life, logged_progress, predicted
from benchmarks.campaigns.design import DESIGNS, SHORT
from benchmarks.campaigns.published import (
    FIGURES,
    SPOT,
    closed_forms,
    published_figures,
    spot_availability,
)
from dpro.extensions.goodput.stages import stages_of

MTBF_S = 60.0
APART_S = 5.0  # between starts of concurrent campaigns, since importing torch takes all cores
ACCOUNT_BAR, MEDIAN_BAR, WORST_BAR = 1.0, 3.0, 8.0
INTERVAL = (5, 95)  # percentiles of simulated goodput


def campaigns(seed: int, count: int, minutes: float, folder: Path, together: int) -> list[Campaign]:
    """Run campaigns; the number of each, counted from the seed, determines its design and failures.

    Args:
        seed: number of the first.
        count: how many.
        minutes: of each.
        folder: for their folders.
        together: how many at once.
    """

    def run(number: int) -> Campaign:
        design = DESIGNS[number % len(DESIGNS)]
        time.sleep(APART_S * ((number - seed) % together))
        print(f"campaign {number}: {design.name}", file=sys.stderr, flush=True)
        return run_campaign(design, number, folder / str(number), minutes * 60, MTBF_S)

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(run, range(seed, seed + count)))


def judged(found: Sequence[Campaign]) -> dict[str, dict[str, Any]]:
    """Compute the checks of accounts and predictions.

    Args:
        found: the campaigns; each is predicted from another of the design `SHORT`.
    """
    lives = [life(each) for each in found]
    errors = [account_errors(each, own) for each, own in zip(found, lives, strict=True)]
    checks = {
        f"account, {name}": _figures([100 * abs(each[name]) for each in errors], ACCOUNT_BAR, ACCOUNT_BAR)
        for name in ("productive", "checkpoint")
    }
    short = [number for number, each in enumerate(found) if each.design == SHORT]
    background = [number for number, each in enumerate(found) if each.design.in_background]
    missed: dict[str, list[float]] = {}
    inside: list[bool] = []
    for number, campaign in enumerate(found):
        place = number % max(len(short), 1)
        base = next((other for other in short[place:] + short if other != number), None)
        saver = next((other for other in background if other != number), None)
        if base is None or (campaign.design.in_background and saver is None):
            continue  # no other campaign to predict it from
        stall_s = stages_of(lives[saver]).stall_s if saver is not None else 0.0
        measured = logged_progress(campaign)
        goodput = measured.whole_s / measured.wall_s
        if not goodput:
            print(f"{campaign.folder.name}: no step of it is done at the end", file=sys.stderr)
            continue
        simulated = predicted(lives[base], campaign.design, campaign, stall_s)
        said, (low, high) = float(simulated.mean()), np.percentile(simulated, INTERVAL)
        inside.append(bool(low <= goodput <= high))
        missed.setdefault(campaign.design.name, []).append(100 * abs(said / goodput - 1))
        print(
            f"{campaign.folder.name}, {campaign.design.name}: predicted {said:.1%} "
            f"({low:.1%} to {high:.1%}), measured {goodput:.1%}",
            file=sys.stderr,
        )
    checks |= {
        f"predicted, {name}": _figures(errors, MEDIAN_BAR, WORST_BAR) for name, errors in missed.items()
    }
    together = _figures([each for errors in missed.values() for each in errors], MEDIAN_BAR, WORST_BAR)
    together["figures"]["inside_interval_pct"] = round(100 * statistics.mean(inside or [False]), 1)
    return checks | {"predicted from another campaign": together}


def published(folder: Path) -> dict[str, dict[str, Any]]:
    """Compute the checks of the published tables in a folder.

    Args:
        folder: may have `FIGURES` and `SPOT`.
    """
    found = {}
    if (folder / FIGURES).is_file():
        found["published_figures"] = published_figures(folder)
    if (folder / SPOT).is_file():
        found["spot_availability"] = spot_availability(folder)
    return found


def _figures(errors: Sequence[float], median_bar: float, worst_bar: float) -> dict[str, Any]:
    median, worst = statistics.median(errors or [0.0]), max(errors, default=0.0)
    return {
        "n": len(errors),
        "figures": {"median_pct": round(median, 2), "worst_pct": round(worst, 2)},
        "bar": f"median <= {median_bar:g}%, worst <= {worst_bar:g}%",
        "holds": median <= median_bar and worst <= worst_bar if errors else None,
    }


def main() -> None:
    """Run campaigns and print the errors of dpro's accounts and predictions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--campaigns", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--together", type=int, default=2, help="Campaigns at once.")
    parser.add_argument("--keep", type=Path, help="Keep the campaigns in this folder.")
    parser.add_argument("--data", type=Path, help="Campaigns that were kept, or published tables.")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.data and not asked.data.is_dir():
        parser.error(f"{asked.data}: no such folder")
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        found = {"closed_forms": closed_forms()}
        if asked.data:
            found |= published(asked.data)
            done = kept_campaigns(asked.data)
        else:
            done = campaigns(asked.seed, asked.campaigns, asked.minutes, folder, asked.together)
        if done:
            found |= judged(done)
    if asked.json:
        print(json.dumps(found))
        return
    for check, figures in found.items():
        print(f"{check}: {figures}")


if __name__ == "__main__":
    as_program(main)
