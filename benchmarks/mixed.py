"""`python -m benchmarks.mixed`: two workers, one of which has half the speed of the other.

Their steps wait without using the processor, twice as long on the slow one. Each is measured alone, and then both
together: with asynchronous updates, and with synchronous ones that divide the examples by speed or equally. The result
is the share of the sum of both speeds that they reach together, in examples per second.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster import ROOT
from benchmarks.command import end_on_sigterm, log, publish
from benchmarks.waits import CLUSTER, PROGRAM, launched, rate_of, recipe_of
from tfdist_cli.bench.figures import Spread

BATCH = 32
"""A worker's batch, on average: large enough to be divided finely."""
FAST, SLOW = "the fast worker alone", "the slow worker alone"


@dataclass(frozen=True)
class Training:
    """A training of one or both workers.

    Args:
        wait: for each worker the milliseconds that a batch of `BATCH` examples takes.
        updates: the update rule, as YAML.
        per_step: the examples of a global step, in batches.
        strategy: the cluster's.
    """

    wait: list[float]
    updates: str = "{mode: async}"
    per_step: int = 1
    strategy: str = "parameter_server"

    def cluster(self) -> str:
        """Returns the cluster file."""
        roles = f"worker: {{replicas: {len(self.wait)}}}"
        if self.strategy == "parameter_server":
            roles = f"chief: {{}}, ps: {{}}, {roles}"
        return CLUSTER.format(strategy=self.strategy, roles=roles)


def trainings(milliseconds: float) -> dict[str, Training]:
    """Returns what is measured; the fast worker's batch takes `milliseconds`."""
    both = [milliseconds, 2 * milliseconds]
    proportional = "{mode: sync, batch: proportional}"
    return {
        FAST: Training(both[:1]),
        SLOW: Training(both[1:]),
        "both, async": Training(both),
        "both, sync, proportional": Training(both, proportional, 2),
        "both, sync, equal batches": Training(both, "{mode: sync}", 2),
        "both, mirrored, proportional": Training(both, proportional, 2, "multi_worker_mirrored"),
    }


def measure(training: Training, seconds: float, checkout: Path) -> float:
    """Trains, and returns the examples per second.

    Args:
        training: what to train.
        seconds: how long to measure.
        checkout: the checkout whose `tfdist_cli` trains.

    Raises:
        RunFailed: the training failed, or did not begin in time.
    """
    settings = [f"params.batch={BATCH}", f"train.batch_size={BATCH}", f"updates={training.updates}"]
    if "proportional" in training.updates:
        settings.append("train.share=split")
    with launched(training.cluster(), recipe_of(training), PROGRAM, settings=settings, checkout=checkout) as run:
        begun = run.await_settled()
        run.await_report(begun + seconds, 3 * seconds)
        reports = [each for each in run.reports() if each[0] >= begun]
    return rate_of(reports) * training.per_step * BATCH


def shares(rates: Mapping[str, float]) -> dict[str, float]:
    """Returns for each training of both workers the share that it reaches of the sum of both speeds.

    Args:
        rates: a round's examples per second.
    """
    speeds = rates[FAST] + rates[SLOW]
    return {name: rate / speeds for name, rate in rates.items() if name not in (FAST, SLOW)}


def table(rounds: Sequence[Mapping[str, float]]) -> str:
    """Returns the results as a Markdown table: medians, and the range of the shares."""
    rows = ["| workers | examples/s | of the sum of both speeds |", "|---|---|---|"]
    for name in rounds[0]:
        rate = statistics.median(rates[name] for rates in rounds)
        own = [shares(rates).get(name) for rates in rounds]
        shown = Spread.of([share for share in own if share is not None]).shown(3) if own[0] is not None else ""
        rows.append(f"| {name} | {rate:.0f} | {shown} |")
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each training in each round, and prints a table."""
    arguments = _parser().parse_args(argv)
    end_on_sigterm()
    rounds: list[dict[str, float]] = []
    for _ in range(arguments.rounds):
        rates: dict[str, float] = {}
        for name, training in trainings(arguments.milliseconds).items():
            rates[name] = measure(training, arguments.seconds, arguments.checkout)
            log(f"{name}: {rates[name]:.0f} examples/s")
        rounds.append(rates)
    publish("benchmarks.mixed", argv, table(rounds))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="trainings of each kind, in turns (default: 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure each (default: 10)")
    parser.add_argument(
        "--milliseconds", type=float, default=100.0, help="what a batch of the fast worker takes (default: 100)"
    )
    parser.add_argument(
        "--checkout", type=Path, default=ROOT, help="measure tfdist from this checkout (default: this one)"
    )
    return parser


if __name__ == "__main__":
    main()
