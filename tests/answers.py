"""What programs rely on in the answers of the commands that analyse a run: keys and their types.

Commands may say more.
"""

from __future__ import annotations

from typing import Any

NUMBER = (int, float)


TEXTS, RANKS = [str], [int]


CONTENTS = {
    "run": str,
    "ranks": RANKS,
    "world_size": int,
    "missing_ranks": RANKS,
    "rows": dict,
    "warnings": TEXTS,
    "skipped": dict,
}


PREDICTION = {
    "edits": TEXTS,
    "predicted_ms": NUMBER,
    "speedup": NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "how": str,
}


FINDING = {
    "class": str,
    "component": {"kind": str, "id": str},
    "ranks": RANKS,
    "severity": NUMBER,
    "confidence": NUMBER,
    "cost_ms_per_step": NUMBER,
    "evidence": TEXTS,
}


PARTS = (
    "duration",
    "compute",
    "exposed_comm",
    "exposed_wait",
    "exposed_transfer",
    "overlapped_comm",
    "host_bound",
    "idle",
)


# What programs rely on; commands may say more.
SHAPES: dict[str, Any] = {
    "info": CONTENTS | {"steps": int, "hosts": TEXTS, "gpus": TEXTS, "coverage": dict},
    "report": {
        "steps": [{"step": int, "rank": int} | {f"{part}_ms": NUMBER for part in PARTS}],
        "kernels": [{"name": str, "count": int, "total_ms": NUMBER}],
        "collectives": [
            {
                "op": str,
                "bytes": int,
                "hosts": (int, type(None)),
                "count": int,
                "total_ms": NUMBER,
                "wait_ms": NUMBER,
                "transfer_ms": NUMBER,
                "busbw_gbps": (int, float, type(None)),
            }
        ],
    },
    "replay": {
        "steps": [{"step": int, "measured_ms": NUMBER, "replayed_ms": NUMBER, "error_pct": NUMBER}],
        "error_pct": NUMBER,
        "span_start_error_us": {"p50": NUMBER, "p95": NUMBER},
        "coverage": {
            "collectives_matched": NUMBER,
            "kernels_classified": (int, float, type(None)),
            "time_unexplained": NUMBER,
            "starts_anchored": NUMBER,
        },
        "critical_path": [{"rank": int, "name": str, "kind": str, "ms": NUMBER}],
        "answerable": bool,
        "reasons": TEXTS,
    },
    "whatif": {
        "baseline_ms": NUMBER,
        "predictions": [PREDICTION],
        "refused": [{"edit": str, "reason": str}],
    },
    "diagnose": {"findings": [FINDING], "healthy": bool},
}


def misfits(found: Any, shape: Any, where: str = "") -> list[str]:
    """Where a document lacks a key or has another type than it should, as paths."""
    if isinstance(shape, dict):
        if not isinstance(found, dict):
            return [f"{where}: {found!r} is no object"]
        missing = [f"{where}.{key}: missing" for key in shape if key not in found]
        present = [key for key in shape if key in found]
        return missing + [
            line for key in present for line in misfits(found[key], shape[key], f"{where}.{key}")
        ]
    if isinstance(shape, list):
        if not isinstance(found, list):
            return [f"{where}: {found!r} is no list"]
        return [line for i, item in enumerate(found) for line in misfits(item, shape[0], f"{where}[{i}]")]
    is_truth = isinstance(found, bool) and shape is not bool
    return [] if isinstance(found, shape) and not is_truth else [f"{where}: {found!r} is not {shape}"]
