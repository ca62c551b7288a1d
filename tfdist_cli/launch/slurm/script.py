"""The batch script of a plan: one `srun` of `tfdist role` for all tasks. It needs nothing but tfdist on the nodes.

How the job's end agrees with the tasks' is worked out here, and `task/slot.py` does its part: the exit code of a task
that does not decide what came of the training is 0 for Slurm.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE, Plan
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.sections.cluster import Cluster, decides
from tfdist_cli.spec.sections.resources import MIB
from tfdist_cli.spec.sections.slurm import SlurmSpec
from tfdist_cli.spec.task_id import TaskId

SCRIPT_FILE = "slurm.sh"
SAVE_SECONDS = 60
"""Seconds before the time limit when the training is told to save; Slurm itself may be as late again."""
LEAVE_TOGETHER = 60
"""Seconds from the end of the first of several tasks that end together to that of the last."""
_NEEDS = ("cpus", "memory", "gpus")


def render_script(plan: Plan) -> str:
    """The script; see docs/how-to/slurm.md for what it does when.

    Raises:
        UsageError: `slurm.nodes` is given for a job whose parts need different nodes.
    """
    parts = _parts(plan.cluster)
    lines = ["#!/bin/bash", *_options(plan, parts), "", *_files(plan), "", *_spec(plan).setup, ""]
    return "\n".join([*lines, *_body(plan, parts)])


def saves(plan: Plan) -> bool:
    """Whether the job can go on where it was ended."""
    return plan.recipe is not None and plan.recipe.checkpoint is not None


def _spec(plan: Plan) -> SlurmSpec:
    return plan.cluster.slurm or SlurmSpec()


def _parts(cluster: Cluster) -> list[tuple[TaskId, int]]:
    """Tasks that need the same, one of them and how many; several such parts make a heterogeneous job."""

    def needs(task: TaskId) -> str:
        return str([getattr(cluster.role(task), name) or None for name in _NEEDS])

    grouped = [list(tasks) for _, tasks in groupby(cluster.tasks, needs)]
    return [(tasks[0], len(tasks)) for tasks in grouped]


def _options(plan: Plan, parts: list[tuple[TaskId, int]]) -> Iterator[str]:
    spec = _spec(plan)
    if spec.nodes is not None and len(parts) > 1:
        raise UsageError(
            "slurm.nodes is given, but roles differ in what they need, and so have nodes of their own",
            hint="remove slurm.nodes, or give all roles the same cpus, memory and gpus",
        )
    yield _option("job-name", plan.name)
    yield f"#SBATCH --{'' if saves(plan) else 'no-'}requeue"
    yield "#SBATCH --open-mode=append"
    if saves(plan):
        yield f"#SBATCH --signal=B:USR1@{SAVE_SECONDS}"
    for number, (task, count) in enumerate(parts):
        if number:
            yield "#SBATCH hetjob"
        yield from (f"#SBATCH {option}" for option in _size(plan.cluster, task, count))
        for key in ("nodes", "partition", "account", "qos", "constraint", "time", "gres"):
            value = getattr(spec, key)
            if value is not None:
                yield _option(key, str(value))
        yield from (f"#SBATCH {_quoted(option)}" for option in spec.extra)


def _size(cluster: Cluster, task: TaskId, count: int) -> Iterator[str]:
    role = cluster.role(task)
    cpus = role.cpus or 1
    yield f"--ntasks={count}"
    yield f"--cpus-per-task={cpus}"
    if role.memory:
        yield f"--mem-per-cpu={-(-role.memory.bytes // (cpus * MIB))}M"
    if role.gpus:
        yield f"--gpus-per-task={role.gpus}"


def _option(name: str, value: str) -> str:
    return f"#SBATCH --{name}={_quoted(value)}"


def _quoted(value: str) -> str:
    """A value as sbatch reads it in a script: unlike a shell it knows no variables, and a backslash in any quotes."""
    if re.fullmatch(r"[A-Za-z0-9_./:=,@%+-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _files(plan: Plan) -> Iterator[str]:
    """Writes what the tasks read: the script is whole without the machine that it was made on."""
    yield f"run={shlex.quote(str(plan.run_dir))}"
    yield 'mkdir -p -m 700 -- "$run"'
    cluster = plan.cluster.model_copy(update={"recipe": Path(RECIPE_FILE) if plan.recipe else None})
    yield from _file(CLUSTER_FILE, dump(cluster))
    if plan.recipe:
        yield from _file(RECIPE_FILE, dump(plan.recipe))


def _file(name: str, text: str) -> Iterator[str]:
    end = "END"
    while end in text.splitlines():
        end += "_"
    yield f"cat >\"$run\"/{name} <<'{end}'"
    yield text.removesuffix("\n")
    yield end


def _body(plan: Plan, parts: list[tuple[TaskId, int]]) -> Iterator[str]:
    yield "# `tfdist launch` names the attempt and the start timeout: the tasks then write to files that it follows."
    yield 'if [ -n "${1-}" ]; then export TFDIST_ATTEMPT=$(($1 + ${SLURM_RESTART_COUNT:-0})); fi'
    yield 'if [ -n "${2-}" ]; then export TFDIST_START_TIMEOUT=$2; fi'
    yield f"role=({shlex.join((_spec(plan).python or sys.executable, '-m', 'tfdist_cli', 'role'))})"
    yield f'role+=(--cluster "$run"/{CLUSTER_FILE} --run-dir "$run")'
    if plan.recipe is None:
        yield f"role+=(-- {shlex.join(plan.tasks[0].argv)})"
    if not saves(plan):
        yield f"exec {_srun(plan, parts)}"
        return
    yield "# Before the time limit the training saves a checkpoint, as it does when the job is to make room for others."
    yield "# It ends with 143 then, and the job goes back into the queue, unless it was told not to."
    yield "trap 'told=1; scancel --signal=TERM \"$SLURM_JOB_ID\"' USR1"
    yield f"{_srun(plan, parts)} &"
    # A signal that is caught ends `wait`, and no code tells that apart from a step which died of the same signal.
    yield "told=1"
    yield 'while [ -n "$told" ]; do told=; wait "$!"; code=$?; done'
    yield '[ "$code" != 143 ] || scontrol requeue "$SLURM_JOB_ID"'
    yield 'exit "$code"'


def _srun(plan: Plan, parts: list[tuple[TaskId, int]]) -> str:
    common = ["--label", "--export=ALL", "--distribution=block", *_endings(plan.cluster)]
    steps = []
    for number, (task, count) in enumerate(parts):
        group = [f"--het-group={number}"] if len(parts) > 1 else []
        steps.append(" ".join([*common, *group, *_size(plan.cluster, task, count), '"${role[@]}"']))
    return "srun " + " : ".join(steps)


def _endings(cluster: Cluster) -> list[str]:
    """How srun ends a step whose tasks have not all ended.

    Where one task decides, no other is of use after it, and only its exit code is not 0. Several that decide save and
    leave together: the first that ends must not take the others with it at once. An evaluator may take longer.
    """
    deciding = [task for task in cluster.tasks if decides(cluster.strategy, task)]
    if len(deciding) == 1:
        return ["--kill-on-bad-exit=1", "--wait=0"]
    return ["--kill-on-bad-exit=0", f"--wait={0 if len(cluster.tasks) > len(deciding) else LEAVE_TOGETHER}"]
