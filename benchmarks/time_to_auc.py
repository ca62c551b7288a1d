"""`python -m benchmarks.time_to_auc RECIPE AUC`: from a command to a test AUC, with tfdist and with Keras itself.

`tfdist launch` trains the recipe on asynchronous parameter servers (2 ps, 2 workers) and in one process; Keras's own
`fit` trains it in one process. All score the test data after the same number of batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster import ROOT, RunFailed, base_environment
from benchmarks.command import log
from benchmarks.workload import FOREVER

SIDES = {"ps, 2 workers": "local_ctr.yaml", "one process": "local_single.yaml", "Keras, one process": None}
_TIMEOUT = 600.0


class Reached(NamedTuple):
    """The test that reached the AUC.

    Args:
        seconds: from the start of the command.
        steps: batches that were trained on, of both workers together.
        training_seconds: from the end of the first test, without what was traced and started before.
    """

    seconds: float
    steps: int
    training_seconds: float


def time_to_auc(config: str | None, recipe: Path, steps: int, auc: float) -> Reached:
    """Trains until a test reaches an AUC.

    Args:
        config: the cluster file in `configs`; None for Keras's program.
        recipe: the recipe.
        steps: batches between two tests.
        auc: what is to be reached.

    Raises:
        RunFailed: the command ended before that, or did not reach it in time.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as name:
        folder = Path(name)
        metrics = folder / "metrics.jsonl" if config is None else folder / "run" / "metrics.jsonl"
        begun = time.monotonic()
        with _started(_arguments(config, recipe, steps, folder), folder / "log") as command:
            first, seen = None, 0
            while True:
                tests = _tests(metrics)
                now = time.monotonic()
                for step, value in tests[seen:]:
                    first = first or now
                    if value >= auc:
                        return Reached(now - begun, step, now - first)
                seen = len(tests)
                if command.poll() is not None or now - begun > _TIMEOUT:
                    raise RunFailed(
                        f"{config or 'Keras'} reached {tests}:\n{(folder / 'log').read_text(encoding='utf-8')}"
                    )
                time.sleep(0.02)


@contextmanager
def _started(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        command = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=base_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield command
        finally:
            command.terminate()
            command.wait()


def _arguments(config: str | None, recipe: Path, steps: int, folder: Path) -> list[str]:
    if config is None:
        return ["-m", "benchmarks.programs.recipe_keras", str(recipe), str(steps), str(folder / "metrics.jsonl")]
    settings = {"train.epochs": FOREVER, "train.steps_per_epoch": steps}
    chosen = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    launch = ["-m", "tfdist_cli", "launch", str(ROOT / "configs" / config), "--recipe", str(recipe), *chosen]
    return [*launch, "--run-dir", str(folder / "run"), "--shutdown-timeout", "1"]


def _tests(metrics: Path) -> list[tuple[int, float]]:
    """Returns the step and the AUC of each test so far."""
    text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(line["step"], line["values"]["auc"]) for line in lines if line["split"] == "test"]


def main() -> None:
    """Measures in interleaved rounds, every other one in reverse order; prints medians and ratios to Keras."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("auc", type=float)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="batches between two tests (default: %(default)s)")
    arguments = parser.parse_args()
    reached: dict[str, list[Reached]] = {name: [] for name in SIDES}
    for turn in range(arguments.rounds):
        for name in list(SIDES)[:: -1 if turn % 2 else 1]:
            one = time_to_auc(SIDES[name], arguments.recipe.resolve(), arguments.steps, arguments.auc)
            reached[name].append(one)
            log(f"{name}: {one}")
    peers = reached["Keras, one process"]
    for name, each in reached.items():
        seconds, steps, training = (statistics.median(values) for values in zip(*each, strict=True))
        ratio = statistics.median(own.seconds / peer.seconds for own, peer in zip(each, peers, strict=True))
        print(
            f"{name}: AUC {arguments.auc} after {seconds:.1f} s, {training:.1f} s of them after the first test, and "
            f"{steps:.0f} batches; {ratio:.2f} of the time of Keras"
        )


if __name__ == "__main__":
    main()
