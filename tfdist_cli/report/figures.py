"""Formats numbers, bytes and times for people, and chooses the ticks of axes."""

from __future__ import annotations

import math

UNKNOWN = "\u2013"
"""What stands for an unknown value: a dash."""
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400)
"""Seconds between two ticks of a time axis."""
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def plain(value: float | None) -> str:
    """Formats a number with up to four significant digits; a dash for an unknown one."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def size(value: float | None) -> str:
    """Formats bytes: `1.2 GB`."""
    if value is None:
        return UNKNOWN
    unit = 0
    while abs(value) >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"


def size_rate(value: float | None) -> str:
    """Formats bytes per second: `1.2 MB/s`."""
    return UNKNOWN if value is None else f"{size(value)}/s"


def time(seconds: float | None) -> str:
    """Formats a duration: `3.4 s`, `12 min`, `1 h 5 min`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`."""
    span = high - low
    if not (span > 0 and math.isfinite(span)):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Returns about `count` round times from `low` to `high`, in seconds."""
    raw = (high - low) / count
    if raw < 1 or raw > _STEPS[-1]:
        return ticks(low, high, count)
    step = next(each for each in _STEPS if each >= raw)
    return [float(index * step) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
