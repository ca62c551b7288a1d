"""What the commands of the benchmarks have in common: rounds, and how a result is printed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tfdist_cli.bench.machine import describe

C = TypeVar("C")
R = TypeVar("R")


def end_on_sigterm() -> None:
    """Makes SIGTERM an exit of the program, which also ends what it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def log(text: str) -> None:
    """Writes a line to stderr at once."""
    print(text, file=sys.stderr, flush=True)


def interleaved(
    cases: Iterable[C], rounds: int, measure: Callable[[C], R], shown: Callable[[C, R], str]
) -> dict[C, list[R]]:
    """Measures each case once in each round.

    Args:
        cases: what is measured.
        rounds: how often.
        measure: measures a case.
        shown: a line about a result, for stderr.
    """
    results: dict[C, list[R]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, own in results.items():
            own.append(measure(case))
            log(shown(case, own[-1]))
    return results


def publish(module: str, argv: Sequence[str] | None, text: str) -> None:
    """Prints a result below the command that gives it and the machine.

    Args:
        module: the command's module.
        argv: its arguments; None for those of the process.
        text: the result, in Markdown.
    """
    command = " ".join([f"python -m {module}", *(sys.argv[1:] if argv is None else argv)])
    print(f"`{command}`. {describe()}.\n\n{text}")
