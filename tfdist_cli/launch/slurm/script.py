"""Renders the batch script of a plan: one `srun` of `tfdist role` for all tasks. The nodes need only tfdist.

A task that is added while the others run has a job, and a script, of its own.

This module decides how the tasks' exit codes make the job's, together with `task/slurm_step.py`: a task whose exit code
does not decide the result of the training exits with 0 for Slurm.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.plan.plan import CLUSTER_FILE, RECIPE_FILE, Plan
from tfdist_cli.spec.loading.dump import dump
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.resources import MIB
from tfdist_cli.spec.sections.slurm import SlurmSpec
from tfdist_cli.spec.strategies import decides
from tfdist_cli.spec.task_id import TaskId

SCRIPT_FILE = "slurm.sh"
LOG_FILE = "slurm.log"
"""The output of the scripts, and Slurm's own messages."""
SAVE_SECONDS = 60
"""Seconds before the time limit at which the tasks get the signal to save; Slurm may send it this much later."""
EXIT_TOGETHER_SECONDS = 60
"""The most seconds between the first and the last exit of tasks that exit together."""
_NEEDS = ("cpus", "memory", "gpus")
_PLACES = ("partition", "account", "qos", "constraint", "time", "gres")
"""Keys of the Slurm section that apply to each job of a run."""


def render_script(plan: Plan) -> str:
    """Returns the script, which docs/how-to/slurm.md describes.

    Raises:
        UsageError: `slurm.nodes` is given for a heterogeneous job, whose components have separate nodes.
    """
    components = _components(plan.cluster)
    lines = ["#!/bin/bash", *_options(plan, components), "", *_files(plan), "", *_spec(plan).setup, ""]
    return "\n".join([*lines, *_body(plan, components)])


def render_task_script(plan: Plan, task: TaskId) -> str:
    """Returns the script of a task that is added to a running job. Its arguments are those of the other script.

    Before its time limit, and before it is preempted, the task gets SIGTERM, and leaves.
    """
    lines = ["#!/bin/bash", _option("job-name", f"{plan.name}-{task.slug}"), "#SBATCH --no-requeue"]
    lines += ["#SBATCH --open-mode=append", f"#SBATCH --signal=TERM@{SAVE_SECONDS}"]
    lines += _requests(plan.cluster, task, 1, _PLACES)
    lines += ["", f"run={shlex.quote(str(plan.run_dir))}", "", *_spec(plan).setup, "", *_command(plan, str(task))]
    step = " ".join(["--label", "--export=ALL", *_size(plan.cluster, task, 1), '"${role[@]}"'])
    return "\n".join([*lines, f"exec srun {step}"])


def saves(plan: Plan) -> bool:
    """Whether a requeued job continues from a checkpoint."""
    return plan.recipe is not None and plan.recipe.checkpoint is not None


def _spec(plan: Plan) -> SlurmSpec:
    return plan.cluster.slurm or SlurmSpec()


def _components(cluster: Cluster) -> list[tuple[TaskId, int]]:
    """Groups consecutive tasks with equal resources: the first task of each group, and their number.

    Several groups are the components of a heterogeneous job.
    """

    def needs(task: TaskId) -> str:
        return str([getattr(cluster.role(task), name) or None for name in _NEEDS])

    grouped = [list(tasks) for _, tasks in groupby(cluster.tasks, needs)]
    return [(tasks[0], len(tasks)) for tasks in grouped]


def _options(plan: Plan, components: list[tuple[TaskId, int]]) -> Iterator[str]:
    spec = _spec(plan)
    if spec.nodes is not None and len(components) > 1:
        raise UsageError(
            "slurm.nodes is given, but the roles need different resources and therefore have separate nodes",
            code="slurm-nodes-of-different-roles",
            hint="remove slurm.nodes, or give all roles the same cpus, memory and gpus",
        )
    yield _option("job-name", plan.name)
    yield f"#SBATCH --{'' if saves(plan) else 'no-'}requeue"
    yield "#SBATCH --open-mode=append"
    if saves(plan):
        yield f"#SBATCH --signal=B:USR1@{SAVE_SECONDS}"
    for number, (task, count) in enumerate(components):
        if number:
            yield "#SBATCH hetjob"
        yield from _requests(plan.cluster, task, count, ("nodes", *_PLACES))


def _requests(cluster: Cluster, task: TaskId, count: int, keys: Iterable[str]) -> Iterator[str]:
    """Yields the lines that request the resources of some equal tasks, with these keys of the Slurm section."""
    spec = cluster.slurm or SlurmSpec()
    yield from (f"#SBATCH {option}" for option in _size(cluster, task, count))
    for key in keys:
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
    """Quotes a value for an `#SBATCH` line. Unlike a shell, sbatch expands no variables, and escapes in all quotes."""
    if re.fullmatch(r"[A-Za-z0-9_./:=,@%+-]+", value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _files(plan: Plan) -> Iterator[str]:
    """Yields lines that write the files that the tasks read, so that the script needs no other file."""
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


def _body(plan: Plan, components: list[tuple[TaskId, int]]) -> Iterator[str]:
    yield from _command(plan)
    if not saves(plan):
        yield f"exec {_srun(plan, components)}"
        return
    yield "# Before the time limit, and before it is preempted, the training saves a checkpoint and exits with 143."
    yield "# The job is then requeued, unless it was cancelled."
    yield "trap 'signalled=1; scancel --signal=TERM \"$SLURM_JOB_ID\"' USR1"
    yield f"{_srun(plan, components)} &"
    # A trapped signal ends `wait`, and the exit code is the same as that of a step which this signal has killed.
    yield "signalled=1"
    yield 'while [ -n "$signalled" ]; do signalled=; wait "$!"; code=$?; done'
    yield '[ "$code" != 143 ] || scontrol requeue "$SLURM_JOB_ID"'
    yield 'exit "$code"'


def _command(plan: Plan, task: str = "") -> Iterator[str]:
    """Yields the lines that set the command of the tasks, or of one that is named."""
    yield "# `tfdist launch` gives the attempt and the start timeout: the tasks then write to files that it reads."
    yield 'if [ -n "${1-}" ]; then export TFDIST_ATTEMPT=$(($1 + ${SLURM_RESTART_COUNT:-0})); fi'
    yield 'if [ -n "${2-}" ]; then export TFDIST_START_TIMEOUT=$2; fi'
    yield f"role=({shlex.join((_spec(plan).python or sys.executable, '-m', 'tfdist_cli', 'role'))})"
    if task:
        yield f"role+=(--task {task})"
    yield f'role+=(--cluster "$run"/{CLUSTER_FILE} --run-dir "$run")'
    if plan.recipe is None:
        yield f"role+=(-- {shlex.join(plan.tasks[0].argv)})"


def _srun(plan: Plan, components: list[tuple[TaskId, int]]) -> str:
    common = ["--label", "--export=ALL", "--distribution=block", *_exit_options(plan.cluster)]
    steps = []
    for number, (task, count) in enumerate(components):
        group = [f"--het-group={number}"] if len(components) > 1 else []
        steps.append(" ".join([*common, *group, *_size(plan.cluster, task, count), '"${role[@]}"']))
    return "srun " + " : ".join(steps)


def _exit_options(cluster: Cluster) -> list[str]:
    """Returns the options that say when srun ends a step in which some tasks have exited.

    If one task decides the result, the others are not needed after it, and only its exit code can be nonzero. If
    several decide, they save and exit together: the first exit must not kill the others at once. An evaluator may run
    longer.
    """
    deciding = [task for task in cluster.tasks if decides(cluster.strategy, task.role)]
    if len(deciding) == 1:
        return ["--kill-on-bad-exit=1", "--wait=0"]
    return ["--kill-on-bad-exit=0", f"--wait={0 if len(cluster.tasks) > len(deciding) else EXIT_TOGETHER_SECONDS}"]
