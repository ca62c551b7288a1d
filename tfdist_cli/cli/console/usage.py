"""Formats what a task uses of its machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist_cli.launch.usage import TaskUsage

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def usage_cells(usage: TaskUsage | None) -> tuple[str, str, str, str]:
    """Returns processor, memory, GPUs and network: `0.9 cores`, `412 MB`, `GPU 87% 12 GB`, `↑1.2 ↓3.4 MB/s`."""
    if usage is None:
        return "", "", "", ""
    cpu = "" if usage.cpu is None else f"{usage.cpu:.1f} cores"
    memory = "" if usage.memory is None else amount(usage.memory)
    gpus = []
    for name, gpu in usage.gpus.items():
        percent = "" if gpu.percent is None else f" {gpu.percent:.0f}%"
        gpus.append(f"GPU {name}{percent}" + ("" if gpu.memory is None else f" {amount(gpu.memory)}"))
    rates = [f"{arrow}{amount(rate)}/s" for arrow, rate in (("↑", usage.sent), ("↓", usage.received)) if rate]
    return cpu, memory, ", ".join(gpus), " ".join(rates)


def amount(count: float) -> str:
    """Formats bytes with three digits at most: `1.2 GB`, `12 GB`, `123 GB`."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.1f} {_UNITS[unit]}" if unit and count < 9.95 else f"{count:.0f} {_UNITS[unit]}"
