"""The command line: measures, prints the tables, and with `--write` writes them into the documentation."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import ROOT
from benchmarks.command import end_on_sigterm, log
from benchmarks.contests import run_contests
from benchmarks.grid import FIGURES, GROUPS, against, chosen
from benchmarks.losses import compare_losses
from benchmarks.plot import plot
from benchmarks.race import TURNS
from benchmarks.record import Record, source_of, today
from benchmarks.startup import COMMANDS, command_seconds, first_step_seconds
from benchmarks.table import PACKAGES, Circumstances, render, write
from tfdist_cli.bench.machine import describe
from tfdist_cli.bench.plot import require_matplotlib

PAGE = ROOT / "docs" / "reference" / "benchmark-results.md"
PLOT = PAGE.with_suffix(".svg")
STARTUP = "startup"
FIRST_STEP = "`tfdist launch` (1 chief, 2 ps, 2 workers) up to the first step reported"


def main(argv: Sequence[str]) -> int:
    """Runs the benchmarks; the exit code is 0."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    end_on_sigterm()
    if arguments.list:
        _list()
        return 0
    if arguments.losses and (arguments.record or arguments.write):
        parser.error("--losses prints its table; --record and --write are for the throughput")
    if arguments.write:
        require_matplotlib()
    patterns = [*(arguments.only or []), *(FIGURES if arguments.figures else [])] or ["grid", STARTUP]
    try:
        contests = chosen([pattern for pattern in patterns if pattern != STARTUP])
        record = Record(arguments.record, source_of(describe(PACKAGES), ROOT))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.against:
        contests = against(contests, arguments.against)
    if arguments.losses:
        sys.stdout.write(compare_losses(contests, seeds=arguments.seeds, epochs=arguments.epochs, log=log))
        return 0
    kept = sum(len(record.of(contest.name)) for contest in contests)
    if kept:
        log(f"{kept} rounds are in {arguments.record}; without this file, all would be measured anew")
    outcomes = run_contests(
        contests,
        rounds=arguments.rounds,
        turns=arguments.turns,
        patience=arguments.patience,
        log=log,
        record=record,
    )
    seconds = _startup(arguments.rounds) if STARTUP in patterns else {}
    about = Circumstances(" ".join(["python -m benchmarks", *argv]), today(), describe(PACKAGES))
    drawn = arguments.write and outcomes
    results = render(outcomes, seconds, about, PLOT.name if drawn else None)
    sys.stdout.write(results)
    if drawn:
        plot([each for each in outcomes if each.contest.name in FIGURES] or outcomes, PLOT)
    if arguments.write:
        write(PAGE, results)
    return 0


def _list() -> None:
    for group, contests in GROUPS.items():
        print(f"{group}:")
        for name in contests:
            print(f"  {name}{' (of --figures)' if name in FIGURES else ''}")


def _startup(rounds: int) -> dict[str, list[float]]:
    seconds = {name: [command_seconds(arguments) for _ in range(10)] for name, arguments in COMMANDS.items()}
    seconds[FIRST_STEP] = []
    for number in range(rounds):
        seconds[FIRST_STEP].append(first_step_seconds())
        log(f"round {number + 1}/{rounds}  {FIRST_STEP}: {seconds[FIRST_STEP][-1]:.2f} s")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contest (default: 5)")
    parser.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="measure only contests of this name (as in mlp:ps_async:tf_keras, 'mlp*:mirrored:*') or group, or "
        f"'{STARTUP}'; can be repeated (default: grid and {STARTUP})",
    )
    parser.add_argument("--figures", action="store_true", help="measure the contests of the published figures")
    parser.add_argument("--list", action="store_true", help="print the names of all contests")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"turns of each side in a round (default: {TURNS})")
    parser.add_argument(
        "--losses", action="store_true", help="compare the loss after equal steps instead of the throughput"
    )
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each side with --losses (default: 3)")
    parser.add_argument("--epochs", type=int, default=5, help="their epochs (default: 5)")
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
        "--record",
        type=Path,
        metavar="FILE",
        help="keep the result of each round in this file; the rounds that it has already are not measured again",
    )
    parser.add_argument(
        "--write", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}, and a plot"
    )
    return parser
