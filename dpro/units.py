"""Conversion of numbers to text with units; all times inside dpro are int64 nanoseconds."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
NS_PER_MIN = 60 * NS_PER_S
DATED_NS = 10**10  # earlier values are not times: logs without times have line numbers instead
NS_PER_H = 60 * NS_PER_MIN
S_PER_H = 3600

# Shortest duration in ns that is written in the unit, name of the unit, its length in ns; largest unit first.
_UNITS = (
    (2 * NS_PER_H, "h", NS_PER_H),
    (2 * NS_PER_MIN, "min", NS_PER_MIN),
    (NS_PER_S, "s", NS_PER_S),
    (NS_PER_MS, "ms", NS_PER_MS),
    (NS_PER_US, "us", NS_PER_US),
)


def ms(ns: float) -> float:
    """Convert nanoseconds to milliseconds."""
    return float(ns) / NS_PER_MS


def us(ns: float) -> float:
    """Convert nanoseconds to microseconds."""
    return float(ns) / NS_PER_US


def duration_unit(ns: float) -> tuple[str, int]:
    """Return the unit that suits a duration, `ns` to `h`, and its length in nanoseconds."""
    rounded = abs(float(f"{ns:.3g}"))
    return next(((name, scale) for least, name, scale in _UNITS if rounded >= least), ("ns", 1))


def format_duration(ns: float) -> str:
    """Format a duration with three significant digits in the unit that suits it: `12.3 ms`, `52 min`."""
    unit, scale = duration_unit(ns)
    value = float(f"{ns / scale:.3g}")
    return f"{value:.0f} ns" if scale == 1 else f"{value:,.10g} {unit}"


def format_rate(per_s: float) -> str:
    """Format a rate with four significant digits, or all before the point: `264,988`, `258.5`."""
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"


def time_in_words(time_ns: int) -> str:
    """Format a time as `12:34:56.789 UTC`; a negative one is unknown."""
    if time_ns < 0:
        return "an unknown time"
    seconds, rest = divmod(time_ns, NS_PER_S)
    return f"{datetime.fromtimestamp(seconds, UTC):%H:%M:%S}.{rest // 1_000_000:03d} UTC"


def format_ms(ms: float) -> str:
    """Format a duration in milliseconds with `format_duration`."""
    return format_duration(ms * NS_PER_MS)


def signed_ms(ms: float) -> str:
    """Format a difference in milliseconds, always with a sign."""
    return f"{'-' if ms < 0 else '+'}{format_ms(abs(ms))}"


def format_bytes(count: float, digits: int = 1) -> str:
    """Format a size in decimal units, as bandwidths have: `4.2 MB`; a negative count is unknown.

    Args:
        digits: digits after the point.
    """
    if count < 0:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.{digits}f} TB"


def distinct_sizes(counts: Sequence[int]) -> list[str]:
    """Format sizes with `format_bytes`, with more digits where different sizes would read the same."""
    read_as = [Counter(format_bytes(count, digits) for count in set(counts)) for digits in range(1, 13)]
    return [
        next(
            (
                text
                for digits, texts in enumerate(read_as, 1)
                if texts[text := format_bytes(count, digits)] == 1
            ),
            f"{count:,} B",
        )
        for count in counts
    ]
