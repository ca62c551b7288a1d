"""The command line: measures, prints the tables, and with `--write` writes them into the documentation."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from benchmarks.cluster import ROOT
from benchmarks.contests import CONTESTS, against, run_contests
from benchmarks.plot import plot
from benchmarks.startup import COMMANDS, command_seconds, first_step_seconds
from benchmarks.table import PACKAGES, Circumstances, render, write
from benchmarks.workload import Workload
from tfdist_cli.bench.machine import describe
from tfdist_cli.bench.plot import require_matplotlib

PAGE = ROOT / "docs" / "reference" / "benchmark-results.md"
PLOT = PAGE.with_suffix(".svg")
STARTUP = "startup"
FIRST_STEP = "`tfdist launch` (1 chief, 2 ps, 2 workers) up to the first step reported"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks; the exit code is 0."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # also ends its clusters
    if arguments.write:
        require_matplotlib()
    chosen = arguments.only or [*CONTESTS, STARTUP]
    workload = Workload("", steps=arguments.steps)
    contests = [contest for key, contest in CONTESTS.items() if key in chosen]
    if arguments.against:
        contests = [against(contest, arguments.against) for contest in contests]
    outcomes = run_contests(contests, workload, rounds=arguments.rounds, patience=arguments.patience, log=_log)
    seconds = _startup(arguments.rounds) if STARTUP in chosen else {}
    today = datetime.now(timezone.utc).date()
    about = Circumstances(" ".join(["python -m benchmarks", *argv]), today, arguments.rounds, describe(PACKAGES))
    drawn = arguments.write and outcomes
    results = render(outcomes, seconds, about, PLOT.name if drawn else None)
    sys.stdout.write(results)
    if drawn:
        plot(outcomes, PLOT)
    if arguments.write:
        write(PAGE, results)
    return 0


def _startup(rounds: int) -> dict[str, list[float]]:
    seconds = {name: [command_seconds(arguments) for _ in range(10)] for name, arguments in COMMANDS.items()}
    seconds[FIRST_STEP] = []
    for number in range(rounds):
        seconds[FIRST_STEP].append(first_step_seconds())
        _log(f"round {number + 1}/{rounds}  {FIRST_STEP}: {seconds[FIRST_STEP][-1]:.2f} s")
    return seconds


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contest (default: 5)")
    parser.add_argument(
        "--only", action="append", choices=[*CONTESTS, STARTUP], help="measure only this; can be repeated"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps in an epoch (default: 200)")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="compare with tfdist from this other checkout, not with the peers",
    )
    parser.add_argument(
        "--patience",
        type=int,
        default=0,
        help="repetitions of a run if other processes were busy (default: 0)",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}, and a plot"
    )
    return parser
