"""`python -m benchmarks.bubble`: the part of the time that stages of `model_parallel` are idle.

The passes of each stage wait without using the processor, so that more stages than cores work at the same time. M
micro-batches pass through S stages of equal times. In an ideal pipeline a stage is idle for (S − 1) / (M + S − 1) of
the time (Huang et al., GPipe, 2019, section 2.3). What is above it is sending, updating, and other work between steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.command import end_on_sigterm, interleaved, publish
from benchmarks.waits import launched, rate_of
from tfdist_cli.bench.figures import Spread
from tfdist_cli.bench.machine import Usage

PROGRAM = Path(__file__).parent / "programs" / "stages.py"
CLUSTER = """
strategy: model_parallel
roles: {{chief: {{}}, worker: {{replicas: {stages}}}}}
recipe: recipe.yaml
"""
RECIPE = """
module: benchmarks.programs.stages
params: {{stages: {stages}, wait: {wait}, batch: {batch}}}
place: {{{place}}}
micro_batches: {parts}
train: {{batch_size: {batch}, epochs: 1000000, steps_per_epoch: 1000000}}
evaluate: null
"""
BATCH = 64
WAIT = 80.0
"""Milliseconds of a stage's forward pass of a batch; the backward pass takes twice as long."""


@dataclass(frozen=True)
class Case:
    """A pipeline.

    Args:
        stages: S.
        parts: M, the micro-batches of a step.
    """

    stages: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Reads `2:8`, 2 stages and 8 micro-batches.

        Raises:
            ValueError: it is not of this form.
        """
        stages, parts = text.split(":")
        return cls(int(stages), int(parts))

    @property
    def ideal(self) -> float:
        """The part of the time that a stage of an ideal pipeline is idle."""
        return (self.stages - 1) / (self.parts + self.stages - 1)

    def recipe(self) -> str:
        """Returns its recipe."""
        place = ", ".join(f'stage_{number}: "worker:{number}"' for number in range(self.stages))
        return RECIPE.format(stages=self.stages, parts=self.parts, wait=WAIT, batch=BATCH, place=place)


FIGURES = [Case(2, 1), Case(2, 4), Case(2, 8), Case(4, 4), Case(4, 8), Case(4, 16)]
"""Those whose results are published."""


@dataclass(frozen=True)
class Result:
    """What was measured.

    Args:
        milliseconds: the time of a step.
        others: the part of the machine that other processes, and these tasks, used.
    """

    milliseconds: float
    others: float

    @property
    def idle(self) -> float:
        """The part of the time that a stage was idle."""
        return 1 - 3 * WAIT / self.milliseconds


def measure(case: Case, seconds: float) -> Result:
    """Trains, and measures when the training has gone on for some seconds.

    Raises:
        RunFailed: the training failed, or did not begin in time.
    """
    with launched(CLUSTER.format(stages=case.stages), case.recipe(), PROGRAM) as run:
        begun, usage = run.await_settled(), Usage.now()
        run.await_report(begun + seconds, 3 * seconds)
        others = usage.others()
        rate = rate_of([each for each in run.reports() if each[0] >= begun])
    return Result(1000 / rate, others)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each case in each round, and prints a table."""
    arguments = _parser().parse_args(argv)
    end_on_sigterm()
    results = interleaved(
        arguments.cases or FIGURES,
        arguments.rounds,
        lambda case: measure(case, arguments.seconds),
        lambda case, result: f"{case}: {result}",
    )
    publish("benchmarks.bubble", argv, table(results))


def table(results: Mapping[Case, Sequence[Result]]) -> str:
    """Returns the results as a Markdown table."""
    rows = [
        "| stages | micro-batches | ms a step | idle | (S − 1) / (M + S − 1) | machine used |",
        "|---|---|---|---|---|---|",
    ]
    for case, own in results.items():
        step = statistics.median(result.milliseconds for result in own)
        idle = Spread.of([result.idle for result in own]).shown(3)
        others = max(result.others for result in own)
        rows.append(f"| {case.stages} | {case.parts} | {step:.0f} | {idle} | {case.ideal:.3f} | {others:.0%} |")
    return "\n".join(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bubble", description=__doc__)
    parser.add_argument(
        "cases", nargs="*", type=Case.parse, metavar="STAGES:MICRO_BATCHES", help="default: six of them"
    )
    parser.add_argument("--rounds", type=int, default=1, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each is measured (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main()
