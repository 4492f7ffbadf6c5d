"""How often a job fails: from its own attempts, from a log, or as others have published.

In: what was seen or given. Out: `FailureRate`: failures of the job as a whole, and of each host, per hour.
Small jobs fail more often than their hosts alone explain, since software and storage fail, too: so there are
two rates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.errors import InputError, Unanswerable, first_line
from dpro.goodput.recovery.stages import SeenFailures
from dpro.limits import read_small
from dpro.panics import panics_as
from dpro.units import NS_PER_S, NS_PER_US, S_PER_H, format_duration

MIN_FAILURES = 3  # of its own that a job's rate is taken from
YEAR_LAST = re.compile(r"\s*\d{1,2}[/.-]\d{1,2}[/.-]\d{4}")
MAX_TIME_S = 1e11  # the year 5138: what is larger counts ms, us or ns


@dataclass(frozen=True)
class FailureRate:
    """Failures per hour.

    Attributes:
        job: of the job as a whole.
        host: of each host.
        count: failures that the rate rests on: how sure it is; 0 for a rate that was given.
        source: where it comes from.
    """

    job: float
    host: float
    count: int
    source: str

    def per_s(self, jobs: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """[S] both rates per second, for jobs that differ as far as the rate is not known.

        Args:
            rng: draws them from the Gamma distribution of a rate of which `count` failures were seen.
        """
        sure = rng.gamma(self.count, 1 / self.count, jobs) if self.count else np.ones(jobs)
        return self.job / S_PER_H * sure, self.host / S_PER_H * sure


# Of hosts with 8 GPUs. What each was computed from is in docs/goodput.md.
PRESETS = {
    # 7.9 h at 1,024 GPUs as measured, 1.8 h at 16,384 as projected (arXiv 2410.21680): two equations.
    "rsc-1": FailureRate(0.0980, 2.234e-4, 0, "RSC-1, A100 (arXiv 2410.21680)"),
    # 419 unexpected interruptions in 54 days on 2,048 hosts, 54 of them software (arXiv 2407.21783, table 5).
    "llama-3": FailureRate(54 / 1296, 365 / 1296 / 2048, 0, "Llama 3, H100 (arXiv 2407.21783)"),
    # About one failure of hardware a week on 48 hosts (its public log).
    "bloom": FailureRate(0.0, 1 / (168 * 48), 0, "BLOOM, A100 (bigscience chronicles)"),
}


def own_rate(seen: SeenFailures) -> FailureRate:
    """The rate of a job's own failures, all counted as of the job.

    Raises:
        Unanswerable: they are too few.
    """
    if seen.count < MIN_FAILURES or seen.up_s <= 0:
        raise Unanswerable(
            f"{seen.count} failures in {format_duration(seen.up_s * NS_PER_S)} do not show how often the job "
            f"fails: give --mtbf-per-gpu HOURS, --failures LOG, or --preset {' or '.join(PRESETS)}"
        )
    per_host = seen.count / (seen.up_s / S_PER_H) / seen.hosts
    return FailureRate(0.0, per_host, seen.count, f"{seen.count} failures of the job's own")


def rate_per_gpu(mtbf_h: float, gpus_per_host: int) -> FailureRate:
    """The rate by the mean time between failures of a GPU."""
    return FailureRate(0.0, gpus_per_host / mtbf_h, 0, f"a failure each {mtbf_h:,.6g} h of a GPU")


def rate_of_log(log: pl.DataFrame, hosts: int) -> FailureRate:
    """The rate of the failures in a log, those without a host counted as of the job.

    Args:
        log: as `read_log` returns it.

    Raises:
        Unanswerable: it holds too few failures, or all at one time.
    """
    span_h = float(log["time_s"][-1] - log["time_s"][0]) / S_PER_H
    count = log.height - 1  # intervals
    if count < MIN_FAILURES or span_h <= 0:
        raise Unanswerable(f"a log of {log.height} failures does not show how often they come: it needs more")
    of_host = float((log["host"] != "").mean())  # type: ignore[arg-type]
    per_h = count / span_h
    return FailureRate(
        per_h * (1 - of_host), per_h * of_host / hosts, count, f"a log of {log.height} failures"
    )


def read_log(path: Path) -> pl.DataFrame:
    """A log of failures: `time_s`, from its first row on, and `host`, empty for failures of no host.

    Args:
        path: CSV or Parquet with a column `time` (ISO 8601, or seconds) and, if known, `host` and `kind`.

    Raises:
        InputError: it cannot be read, or lacks the column.
    """

    def unreadable(why: str) -> InputError:
        return InputError(f"{path}: not readable as a log of failures ({why})")

    content, is_parquet = read_small(path), path.suffix == ".parquet"
    try:
        with panics_as(unreadable):
            file = BytesIO(content)
            frame = pl.read_parquet(file) if is_parquet else pl.read_csv(file, try_parse_dates=True)
            frame = frame.rename({name: name.strip() for name in frame.columns})
    except pl.exceptions.PolarsError as error:
        raise unreadable(first_line(error)) from error
    if "time" not in frame.columns:
        raise InputError(f"{path}: a log of failures has a column 'time', and 'host' where one failed")
    if frame.is_empty() or frame["time"].null_count():
        raise InputError(f"{path}: holds no failure, or one without a time")
    if not is_parquet:
        first = pl.read_csv(BytesIO(content), infer_schema=False, n_rows=1).row(0)
        written = str(first[frame.columns.index("time")])
        if YEAR_LAST.match(written):
            raise InputError(f"{path}: whether {written!r} names the day first is not known: give ISO 8601")
    try:
        host = frame["host"].cast(pl.String).fill_null("") if "host" in frame.columns else pl.lit("")
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: its hosts are no names ({first_line(error)})") from error
    seconds = _seconds(path, frame["time"])
    hosts = pl.DataFrame({"time_s": seconds}).with_columns(host=host)
    return hosts.with_columns(pl.col("host").str.strip_chars()).sort("time_s")


def _seconds(path: Path, time: pl.Series) -> pl.Series:
    """The times of a log in seconds."""
    if time.dtype in (pl.Datetime, pl.Date):
        return time.dt.epoch("us") / (NS_PER_S / NS_PER_US)
    if not time.dtype.is_numeric():
        raise InputError(f"{path}: its times are neither ISO 8601 nor seconds, as {str(time[0])!r}")
    seconds = time.cast(pl.Float64)
    wrong = seconds.filter(~(seconds.abs() <= MAX_TIME_S).fill_null(False))
    if wrong.len():
        raise InputError(f"{path}: a time of {wrong[0]:g} s is none: times are ISO 8601 or seconds")
    return seconds
