"""Starts the process that builds the recipe's model and takes one step, and returns what it has found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tfdist_cli.finding import Finding
from tfdist_cli.launch.run.secrets import Secrets
from tfdist_cli.protocol.check_report import CLUSTER, OUTPUT, RECIPE, REPORT, Report, read_report
from tfdist_cli.protocol.environment import RUN_DIR
from tfdist_cli.protocol.records import LAUNCHER_PID
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.spec.task_id import TaskId

_PROGRAM = ("-m", "tfdist_cli.task.check")
_LAST_LINES = 5


def check_recipe(cluster: Cluster, recipe: Recipe, tasks: Sequence[TaskId], timeout: float) -> Report:
    """Checks a recipe in a process of its own, on the processors only.

    Args:
        cluster: the cluster.
        recipe: the recipe that it trains.
        tasks: draw the data of these tasks only; of all if there are none.
        timeout: seconds after which the process is ended.

    Returns:
        The report. A process that fails or hangs has a finding for it.

    Raises:
        UsageError: a secret has no value.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-check-") as name:
        folder = Path(name)
        (folder / CLUSTER).write_text(dump(cluster), encoding="utf-8")
        (folder / RECIPE).write_text(dump(recipe), encoding="utf-8")
        argv = [sys.executable, *_PROGRAM, name, *map(str, tasks)]
        with (folder / OUTPUT).open("wb") as output:
            ended = _run(argv, _environment(cluster, folder), output.fileno(), timeout)
        report = read_report(folder / REPORT)
        failure = _failure(ended, report, timeout, folder / OUTPUT)
        return replace(report, findings=(*report.findings, failure)) if failure else report


def _run(argv: Sequence[str], env: Mapping[str, str], output: int, timeout: float) -> int | None:
    """Runs a process in a process group of its own. Returns its exit code; None if it was ended after the timeout."""
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):  # also what the user's code has started
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _environment(cluster: Cluster, folder: Path) -> dict[str, str]:
    """Returns the environment of the task that trains first, without its cluster and its GPUs."""
    trainer = next(task for task in cluster.tasks if task.traits.trains)
    env = {**os.environ, **cluster.role(trainer).env, **Secrets.read(cluster).values.get(trainer.role, {})}
    env.pop("TF_CONFIG", None)
    quiet = {"TF_CPP_MIN_LOG_LEVEL": env.get("TF_CPP_MIN_LOG_LEVEL", "2")}
    own = {RUN_DIR: str(folder / "run"), LAUNCHER_PID: str(os.getpid()), "CUDA_VISIBLE_DEVICES": "-1"}
    return {**env, **quiet, **own}


def _failure(ended: int | None, report: Report, timeout: float, output: Path) -> Finding | None:
    """Returns the finding of a process that did not end by itself with code 0."""
    if ended is None:
        return Finding(
            code="check-timeout",
            level="error",
            place="check",
            message=f"{report.stage} took too long: the check was ended after {timeout:g} s",
            fix="look for what waits there, such as a download; --timeout gives the check more time",
        )
    if ended == -signal.SIGKILL:
        return Finding(
            code="check-killed",
            level="error",
            place="check",
            message=f"the check was killed while {report.stage}, perhaps because memory was short",
            fix="check on a machine with more memory, or a smaller model: this process holds all of it",
        )
    if ended:
        last = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        return Finding(
            code="check-failed",
            level="error",
            place="check",
            message=f"the check ended with code {ended} while {report.stage}: {' / '.join(last)}",
            fix="tasks would end in the same way: correct the recipe's module, or its environment",
        )
    return None
