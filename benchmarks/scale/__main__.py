"""`python -m benchmarks.scale`: how far a cluster can grow. See docs/explanation/scale.md."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.scale.simulation import Scenario, simulate

_ROW = "{:>6}  {:>6}  {:>8}  {:>9}  {:>8}  {:>6}  {:>8}  {:>7}  {:>5}  {:>11}"


def main(argv: Sequence[str] | None = None) -> None:
    """Does what the options say."""
    arguments = _parser().parse_args(argv)
    _simulate(arguments)


def _simulate(arguments: argparse.Namespace) -> None:
    """Simulates a job for each seed, and prints what happened in each."""
    columns = ("seed", "tasks", "minutes", "events", "starts", "losses", "attempts", "resizes", "exit", "decisions/s")
    print(_ROW.format(*columns), flush=True)
    events, seconds = 0, 0.0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        scenario = Scenario.draw(seed, arguments.tasks, arguments.hours, arguments.beat)
        outcome = simulate(scenario)
        state = outcome.state
        events, seconds = events + outcome.events, seconds + outcome.decisions
        row = (
            seed,
            len(scenario.tasks),
            f"{outcome.seconds / 60:.1f}",
            outcome.events,
            outcome.starts,
            len(state.lost_tasks),
            state.attempt,
            len(state.resizes),
            state.exit_code,
            f"{outcome.rate:.0f}",
        )
        print(_ROW.format(*row), flush=True)
    print(f"every invariant held; {events} events, {events / seconds:.0f} decisions per second of processor time")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--simulate",
        action="store_true",
        help="simulate the launcher's decisions about tasks that fail at random, and check that none is missing",
    )
    simulated = parser.add_argument_group("--simulate")
    simulated.add_argument("--tasks", type=int, default=1000, help="tasks of each job (default: 1000)")
    simulated.add_argument("--hours", type=float, default=1.0, help="longest simulated time of a job (default: 1)")
    simulated.add_argument("--seeds", type=int, default=10, help="number of jobs (default: 10)")
    simulated.add_argument("--first-seed", type=int, default=0, help="seed of the first job (default: 0)")
    simulated.add_argument(
        "--beat", type=float, default=20.0, help="seconds between two heartbeats of a task (default: 20; really 2)"
    )
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
