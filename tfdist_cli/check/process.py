"""Starts the process that takes one step of a recipe or of a program, and returns what it has found."""

from __future__ import annotations

import os
import re
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
_ONE_STEP = {"KERAS_MAX_EPOCHS": "1", "KERAS_MAX_STEPS_PER_EPOCH": "1"}
"""Keras's own limits for trials, which tfdist keeps too."""
_LAST_LINES = 5
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|tfdist_cli|lib[/\\]python3[^/\\]*)[/\\]|^<")


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


def check_program(cluster: Cluster, program: Sequence[str], timeout: float) -> Report:
    """Runs a program in one process without its cluster, in which Keras and tfdist train a single step.

    Args:
        cluster: the cluster.
        program: the program and its arguments.
        timeout: seconds after which it is ended.

    Returns:
        A report with a finding if the program fails, hangs or is not there.

    Raises:
        UsageError: a secret has no value.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-check-") as name:
        output, report = Path(name, OUTPUT), Report(f"running {Path(program[0]).name}")
        env = {**_environment(cluster, Path(name)), **_ONE_STEP}
        Path(env[RUN_DIR]).mkdir()
        try:
            with output.open("wb") as file:
                ended = _run(program, env, file.fileno(), timeout)
        except OSError as error:
            fix = "write its name as the shell finds it"
            message = f"the program {program[0]!r} cannot be started: {error.strerror}"
            return replace(report, findings=(Finding("program-not-found", "error", program[0], message, fix),))
        text = output.read_text(encoding="utf-8", errors="replace")
        failure = _program_failure(text) if ended and ended > 0 else _failure(ended, report, timeout, output)
        return replace(report, findings=(failure,)) if failure else report


def _program_failure(text: str) -> Finding:
    """Returns the finding of a program that failed: its last line, at the last line of code that is the user's."""
    frames = [frame for frame in _FRAME.findall(text) if not _LIBRARY.search(frame[0])]
    last = [line for line in text.splitlines() if line.strip()][-1:]
    return Finding(
        code="program-failed",
        level="error",
        place=":".join(frames[-1]) if frames else "program",
        message=f"the program fails in one process: {last[0] if last else 'it prints nothing'}",
        fix="correct the program: run alone, without tfdist launch, it fails in the same way",
    )


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
