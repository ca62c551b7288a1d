"""`python -m benchmarks.first_epoch`: from a command to the end of the first epoch, with tfdist and with Keras itself.

Every side trains the language model on the same number of examples. `tfdist launch` runs the recipe in one process, on
two mirrored workers with half of the batch each, and on parameter servers; and a program that calls `tfdist.fit`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT, RunFailed, base_environment
from benchmarks.command import log
from benchmarks.data import write
from benchmarks.sizes import SIZES
from benchmarks.workload import FOREVER, Workload

WORKLOAD = Workload("transformer", batch_size=SIZES["transformer"].batch, steps=100, steps_per_execution=10)
"""An epoch, for all workers together."""
_TIMEOUT = 300.0


@dataclass(frozen=True)
class Side:
    """A way to start the training.

    Args:
        cluster: the cluster file without its recipe; None for Keras's program.
        workers: workers that share each batch.
        program: what `tfdist launch` runs in place of the recipe.
    """

    cluster: dict[str, Any] | None = None
    workers: int = 1
    program: Sequence[str] = ()


_SINGLE = {"strategy": "single", "roles": {"chief": {}}}
SIDES = {
    "keras": Side(),
    "single": Side(_SINGLE),
    "mirrored": Side({"strategy": "multi_worker_mirrored", "roles": {"worker": {"replicas": 2}}}, workers=2),
    "ps": Side({"strategy": "parameter_server", "roles": {"chief": {}, "ps": {}, "worker": {"replicas": 2}}}),
    "program": Side(_SINGLE, program=("-m", "benchmarks.programs.tfdist_fit")),
}


def first_epoch_seconds(side: Side, workload: Workload = WORKLOAD, checkout: Path = ROOT) -> float:
    """Returns the time from the start of the command to the end of the first epoch.

    Args:
        side: what is started.
        workload: what it trains.
        checkout: the checkout whose `tfdist_cli` it uses.

    Raises:
        RunFailed: the command ended before that, or the epoch did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as name:
        folder = Path(name)
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
        (folder / "tfdist_cli").symlink_to(checkout / "tfdist_cli")
        record, log = folder / "record.jsonl", folder / "log"
        if side.program:
            write(folder, workload.size)
        own = replace(workload, record=str(record), data=name).as_environment()
        with log.open("wb") as output:
            begun = time.monotonic()
            command = subprocess.Popen(
                [sys.executable, *_arguments(side, workload, folder)],
                cwd=folder,
                env=base_environment() | own | {"PYTHONPATH": name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            while not (record.exists() and record.read_text(encoding="utf-8").endswith("\n")):
                if command.poll() is not None or time.monotonic() - begun > _TIMEOUT:
                    raise RunFailed(f"no epoch has ended:\n{log.read_text(encoding='utf-8')}")
                time.sleep(0.02)
        finally:
            _stop(command)
        return float(json.loads(record.read_text(encoding="utf-8").splitlines()[0])["moment"]) - begun


def _arguments(side: Side, workload: Workload, folder: Path) -> list[str]:
    """Returns the arguments of Python; writes the files that they name."""
    if side.cluster is None:
        return ["-m", "benchmarks.programs.language_model_keras"]
    recipe, cluster = folder / "recipe.yaml", dict(side.cluster)
    if not side.program:
        cluster["recipe"] = str(recipe)
    content = {
        "module": "benchmarks.programs.language_model",
        "params": {"examples": workload.steps * workload.batch_size},
        "train": {"epochs": FOREVER, "batch_size": workload.batch_size // side.workers},
        "evaluate": None,
    }
    recipe.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    (folder / "cluster.yaml").write_text(json.dumps(cluster), encoding="utf-8")
    launch = ["-m", "tfdist_cli", "launch", "cluster.yaml", "--run-dir", str(folder / "run"), "--shutdown-timeout", "1"]
    return launch + (["--", sys.executable, *side.program] if side.program else [])


def _stop(command: subprocess.Popen[bytes]) -> None:
    if command.poll() is None:
        os.kill(command.pid, signal.SIGTERM)
    try:
        command.wait(timeout=30)
    except subprocess.TimeoutExpired:
        command.kill()
        command.wait()


def main() -> None:
    """Measures in interleaved rounds, every other one in reverse order; prints seconds, medians and ratios to Keras."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", choices=[name for name in SIDES if name != "keras"])
    parser.add_argument("--steps", type=int, default=WORKLOAD.steps, help="steps in an epoch (default: %(default)s)")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout whose tfdist is measured")
    arguments = parser.parse_args()
    sides = {name: side for name, side in SIDES.items() if name in ("keras", *(arguments.only or SIDES))}
    workload = replace(WORKLOAD, steps=arguments.steps)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(arguments.rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            seconds[name].append(first_epoch_seconds(sides[name], workload, arguments.checkout.resolve()))
            log(f"{name}: {seconds[name][-1]:.2f} s")
    for name, each in seconds.items():
        ratios = [own / peer for own, peer in zip(each, seconds["keras"], strict=True)]
        print(
            f"{name}: {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f}), "
            f"{statistics.median(ratios):.2f} of Keras's program ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
