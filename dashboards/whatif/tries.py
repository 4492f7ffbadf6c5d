"""What was predicted and what was measured, of the changes that were tried on this machine.

In: entries of the ledger of `dpro try`, of all runs. Out: a table, the latest first.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from dpro.trial.ledger import LedgerEntry

_RATIOS = {"ratio": "", "low": "_low", "high": "_high"}


def ledger_info(entries: Sequence[LedgerEntry]) -> pl.DataFrame:
    """Tabulate the entries of the ledger.

    Returns:
        `time`, `edits`, `kind`, `baseline_ms`, `predicted_ms` with `predicted_low_ms` and `predicted_high_ms`
        (null where there was no prediction), `measured_ms` with its interval, `off_by` (predicted / measured
        - 1) and `inside` (whether the measured step is in the predicted interval).
    """
    rows = [
        {
            "time": entry.time,
            "edits": " ".join(entry.edits),
            "kind": entry.kind,
            "baseline_ms": entry.baseline_ms,
            **{
                f"{side}{suffix}_ms": None if ratio is None else getattr(ratio, name) * entry.baseline_ms
                for side, ratio in (("predicted", entry.predicted), ("measured", entry.measured))
                for name, suffix in _RATIOS.items()
            },
            "off_by": entry.predicted and entry.predicted.ratio / entry.measured.ratio - 1,
            "inside": entry.is_inside,
        }
        for entry in entries
    ]
    times = [f"{side}{suffix}_ms" for side in ("predicted", "measured") for suffix in _RATIOS.values()]
    schema: dict[str, pl.DataType] = dict.fromkeys(("time", "edits", "kind"), pl.String())
    schema |= dict.fromkeys(("baseline_ms", *times, "off_by"), pl.Float64()) | {"inside": pl.Boolean()}
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    return frame.sort("time", descending=True, maintain_order=True)
