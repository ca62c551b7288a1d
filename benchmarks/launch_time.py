"""`python -m benchmarks.launch_time`: the time to the first step, with a fork and with an interpreter for each task."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.cluster import ROOT
from benchmarks.command import log
from benchmarks.data import write
from benchmarks.sizes import SIZES
from benchmarks.startup import first_step_seconds
from benchmarks.workload import Workload

CLUSTER = """
strategy: parameter_server
roles: {{chief: {{}}, ps: {{replicas: 2}}, worker: {{replicas: 4}}}}
{trains}
"""
INTERPRETERS = """
from tfdist_cli.__main__ import main
from tfdist_cli.launch.local import launcher as local

local.can_fork = lambda argv, env: False
main()
"""
"""`tfdist` with an interpreter for each task."""
COMMANDS = {"fork": ("-m", "tfdist_cli"), "interpreter": ("-c", INTERPRETERS)}


def main() -> None:
    """Measures in interleaved rounds, every other one in reverse order; prints seconds, medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", action="store_true", help="launch a program that calls tfdist.fit, not a recipe")
    arguments = parser.parse_args()
    trains = "" if arguments.program else f"recipe: {ROOT / 'recipes' / 'digits_mlp.yaml'}"
    command = [sys.executable, "-m", "benchmarks.programs.tfdist_fit"] if arguments.program else []
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as folder:
        write(Path(folder), SIZES["mlp"])
        workload = Workload("mlp", SIZES["mlp"].batch, 100, 20, record=os.devnull, data=folder)
        os.environ |= workload.as_environment()
        cluster = Path(folder, "cluster.yaml")
        cluster.write_text(CLUSTER.format(trains=trains), encoding="utf-8")
        for turn in range(arguments.rounds):
            for name in list(COMMANDS)[:: -1 if turn % 2 else 1]:
                seconds[name].append(first_step_seconds(str(cluster), COMMANDS[name], command))
                log(f"{name}: {seconds[name][-1]:.2f} s")
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, each in seconds.items():
        print(f"{name}: {medians[name]:.2f} s ({min(each):.2f} to {max(each):.2f})")
    print(f"ratio of medians: {medians['interpreter'] / medians['fork']:.2f}")


if __name__ == "__main__":
    main()
