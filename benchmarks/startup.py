"""Wall times of commands, and of a launch up to its first step."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import ROOT, RunFailed, base_environment

CLUSTER = "configs/local.yaml"
"""1 chief, 2 ps, 2 workers and a recipe."""
COMMANDS = {"`tfdist --help`": ["--help"], f"`tfdist validate {CLUSTER}`": ["validate", CLUSTER]}
PROGRAM = ("-m", "tfdist_cli")
_TIMEOUT = 120.0


def command_seconds(arguments: list[str]) -> float:
    """Returns the wall time of one `tfdist` command.

    Raises:
        RunFailed: it failed.
    """
    begun = time.perf_counter()
    done = subprocess.run(_argv(arguments), cwd=ROOT, env=base_environment(), capture_output=True, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode:
        raise RunFailed(f"tfdist {' '.join(arguments)} exited with code {done.returncode}: {done.stderr.decode()}")
    return seconds


def first_step_seconds(cluster: str = CLUSTER, program: Sequence[str] = PROGRAM, command: Sequence[str] = ()) -> float:
    """Returns the time from the start of `tfdist launch` to the first line in the run's metrics.jsonl.

    Args:
        cluster: the cluster file.
        program: the arguments of Python that run `tfdist`.
        command: the program to launch, if it is not the cluster's recipe.

    Raises:
        RunFailed: the run ended before that, or the line did not appear in time.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-benchmark-") as folder:
        metrics, log = Path(folder, "run", "metrics.jsonl"), Path(folder, "log")
        options = ["launch", cluster, "--run-dir", str(metrics.parent), "--shutdown-timeout", "5"]
        with log.open("wb") as output:
            begun = time.perf_counter()
            launch = subprocess.Popen(
                _argv([*options, *(["--", *command] if command else [])], program),
                cwd=ROOT,
                env=base_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            while not (metrics.exists() and metrics.stat().st_size):
                if launch.poll() is not None or time.perf_counter() - begun > _TIMEOUT:
                    raise RunFailed(f"tfdist launch made no step:\n{log.read_text(encoding='utf-8')}")
                time.sleep(0.005)
            return time.perf_counter() - begun
        finally:
            _stop(launch)


def _argv(arguments: list[str], program: Sequence[str] = PROGRAM) -> list[str]:
    return [sys.executable, *program, *arguments]


def _stop(launch: subprocess.Popen[bytes]) -> None:
    launch.send_signal(signal.SIGTERM)
    try:
        launch.wait(timeout=30)
    except subprocess.TimeoutExpired:
        launch.kill()
        launch.wait()
