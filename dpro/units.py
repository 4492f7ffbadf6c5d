"""Times are int64 nanoseconds everywhere inside; these turn them into what people read."""

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def ms(ns: float) -> float:
    """Nanoseconds as milliseconds."""
    return float(ns) / NS_PER_MS


def us(ns: float) -> float:
    """Nanoseconds as microseconds."""
    return float(ns) / NS_PER_US


def format_duration(ns: float) -> str:
    """A duration with three significant digits in the unit that suits it: `12.3 ms`, `410 us`, `3,120 s`."""
    rounded = float(f"{ns:.3g}")
    for unit, scale in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US)):
        if abs(rounded) >= scale:
            return f"{rounded / scale:,.10g} {unit}"
    return f"{rounded:.0f} ns"


def format_bytes(count: float) -> str:
    """A size in decimal units, as those of bandwidths are: `4.2 MB`; a negative count is unknown."""
    if count < 0:
        return "unknown"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
