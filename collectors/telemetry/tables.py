"""From files of samples to rows of `counters`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import polars as pl

from dpro.collectors.launch.recording import Launch
from dpro.collectors.telemetry.samples import TelemetrySample, read_samples, sample_files
from dpro.schema import COUNTERS
from dpro.store import write_part


def convert_samples(launch: Launch, *, whole: bool = False) -> None:
    """Convert what a launch sampled, one part per file; doing it again after a crash gives the same parts.

    Args:
        whole: only files that are whole; the job still runs.
    """
    for path in sample_files(launch.raw, whole=whole):
        host, samples = read_samples(path)
        write_part(launch.run, COUNTERS, _part(launch, path), counters(host, samples))
        path.unlink()


def counters(host: str, samples: Iterable[TelemetrySample]) -> pl.DataFrame:
    """Samples as rows of `counters`."""
    rows: dict[str, list[object]] = {"rank": [], "device": [], "counter": [], "time_ns": [], "value": []}
    for sample in samples:
        for counter, value in sample.values.items():
            rows["rank"].append(sample.rank)
            rows["device"].append(sample.device)
            rows["counter"].append(counter)
            rows["time_ns"].append(sample.time_ns)
            rows["value"].append(float(value))
    schema = {name: COUNTERS.dtypes[name] for name in rows}
    return pl.DataFrame(rows, schema=schema).with_columns(host=pl.lit(host))


def _part(launch: Launch, path: Path) -> str:
    return f"{path.name.partition('.')[0]}-{launch.name}"
