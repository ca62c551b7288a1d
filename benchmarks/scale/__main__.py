"""`python -m benchmarks.scale`: how far a cluster can grow. See docs/explanation/scale.md."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.command import log
from benchmarks.scale.constants import COSTS
from benchmarks.scale.model import Costs, Prediction, Size, predict
from benchmarks.scale.observations import FITTED, VALIDATED, Observation, fit, observe, observe_launcher, read, save
from benchmarks.scale.simulation import Scenario, simulate
from benchmarks.waits import Case

_ROW = "{:>6}  {:>6}  {:>8}  {:>9}  {:>8}  {:>6}  {:>8}  {:>7}  {:>5}  {:>11}"


def main(argv: Sequence[str] | None = None) -> None:
    """Does what the options say."""
    arguments = _parser().parse_args(argv)
    if arguments.simulate:
        _simulate(arguments)
    elif arguments.predict:
        _predict(arguments)
    elif arguments.launch:
        _launch(arguments)
    else:
        _measure(arguments)


def _predict(arguments: argparse.Namespace) -> None:
    """Prints what a cluster is predicted to do."""
    size = Size(
        arguments.workers,
        arguments.ps,
        arguments.step_ms,
        arguments.megabytes,
        arguments.cores,
        arguments.ps_cores,
        arguments.gigabits,
    )
    print(predicted(size, predict(size, COSTS)))


def predicted(size: Size, prediction: Prediction) -> str:
    """Returns a prediction as text."""
    lines = [
        f"{size.workers} workers, {size.ps} ps, steps of {size.step_ms:g} ms, {size.megabytes:g} MB of variables",
        f"{prediction.rate:.1f} steps/s of all workers together, an efficiency of {prediction.efficiency:.2f}",
    ]
    for name, used in prediction.used.items():
        limit, workers = prediction.saturated_at[name], prediction.workers_at[name]
        lines.append(f"{name}: {used:.0%} busy; saturated at {limit:.0f} steps/s, the steps of {workers:.0f} workers")
    tasks, most = 1 + size.ps + size.workers, 1000 / COSTS.launcher
    lines.append(f"launcher: {tasks / most:.0%} of a core; saturated at {most:.0f} tasks")
    return "\n".join(lines)


def _launch(arguments: argparse.Namespace) -> None:
    """Measures the launcher with sleeping tasks, with and without heartbeats."""
    for period in (math.inf, arguments.beat):
        for name, value in asdict(observe_launcher(arguments.tasks, period, arguments.seconds)).items():
            print(f"{name}: {value:.6g}")
        print(flush=True)


def _measure(arguments: argparse.Namespace) -> None:
    """Trains what is not in the file of observations yet, and prints the costs and the validation."""
    path = arguments.observations
    seen = {(each.workers, each.ps, each.wait) for each in read(path)}
    for case in arguments.cases or (*FITTED, *VALIDATED):
        if (case.workers, case.ps, case.wait) not in seen:
            save(path, observe(case, arguments.seconds))
            log(str(read(path)[-1]))
    observations = {(each.workers, each.ps, each.wait): each for each in read(path)}
    keys = [(case.workers, case.ps, case.wait) for case in FITTED]
    if missing := [key for key in keys if key not in observations]:
        print(f"no costs without the trainings {missing}")
        return
    costs = fit([observations[key] for key in keys])
    print(costs)
    print(validation([each for key, each in observations.items() if key not in keys], costs))


def validation(observations: Sequence[Observation], costs: Costs) -> str:
    """Returns a table of predicted and measured rates on this machine."""
    lines = ["| workers | ps | step | measured steps/s | predicted | error |", "|---|---|---|---|---|---|"]
    for each in sorted(observations, key=lambda each: (each.wait, each.workers, each.ps)):
        cores = (os.cpu_count() or 1) * (1 - each.others)
        rate = predict(Size(each.workers, each.ps, each.wait, cores=cores), costs).rate
        error = f"{rate / each.rate - 1:+.0%}"
        lines.append(f"| {each.workers} | {each.ps} | {each.wait:g} ms | {each.rate:.1f} | {rate:.1f} | {error} |")
    return "\n".join(lines)


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
    what.add_argument("--predict", action="store_true", help="predict the steps per second of a cluster")
    what.add_argument(
        "--measure", action="store_true", help="measure the costs on this machine, and compare predictions with it"
    )
    what.add_argument("--launch", action="store_true", help="measure the launcher with tasks that sleep")
    _add_predict_options(parser)
    _add_measure_options(parser)
    simulated = parser.add_argument_group("--simulate and --launch")
    simulated.add_argument("--tasks", type=int, default=1000, help="tasks of a job (default: 1000)")
    simulated.add_argument("--hours", type=float, default=1.0, help="longest simulated time of a job (default: 1)")
    simulated.add_argument("--seeds", type=int, default=10, help="number of jobs (default: 10)")
    simulated.add_argument("--first-seed", type=int, default=0, help="seed of the first job (default: 0)")
    simulated.add_argument(
        "--beat", type=float, default=20.0, help="seconds between two heartbeats of a task (default: 20; really 2)"
    )
    return parser


def _add_predict_options(parser: argparse.ArgumentParser) -> None:
    predicted = parser.add_argument_group("--predict")
    predicted.add_argument("--workers", type=int, default=1000, help="workers (default: 1000)")
    predicted.add_argument("--ps", type=int, default=100, help="ps (default: 100)")
    predicted.add_argument("--step-ms", type=float, default=500.0, help="a worker's computation (default: 500)")
    predicted.add_argument("--megabytes", type=float, default=1.0, help="size of the variables (default: 1)")
    predicted.add_argument("--cores", type=int, help="cores of a machine that runs all tasks (default: a machine each)")
    predicted.add_argument("--ps-cores", type=int, default=4, help="cores of each ps (default: 4)")
    predicted.add_argument("--gigabits", type=float, default=10.0, help="network of each ps, per second (default: 10)")


def _add_measure_options(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_argument_group("--measure and --launch")
    measured.add_argument("cases", nargs="*", type=Case.parse, help="trainings, as for benchmarks.waits (default: all)")
    measured.add_argument("--seconds", type=float, default=15.0, help="how long to measure each (default: 15)")
    measured.add_argument(
        "--observations",
        type=Path,
        default=Path("scale-observations.jsonl"),
        help="a file to which measurements are added, and from which those of earlier calls are taken (default: "
        "scale-observations.jsonl)",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
