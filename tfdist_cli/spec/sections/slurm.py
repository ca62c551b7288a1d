"""The cluster file's `slurm`: the options of the job that `launcher: slurm` submits."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from tfdist_cli.errors import InvalidValue
from tfdist_cli.spec.sections.model import SpecModel

_TIME = re.compile(r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}")
_SET_BY_TFDIST = (
    ("--ntasks", "-n"), ("--cpus-per-task", "-c"), ("--gpus-per-task",), ("--nodes", "-N"), ("--partition", "-p"),
    ("--account", "-A"), ("--qos", "-q"), ("--constraint", "-C"), ("--time", "-t"), ("--gres",), ("--job-name", "-J"),
    ("--array", "-a"), ("--signal",), ("--requeue",), ("--no-requeue",), ("--open-mode",), ("--output", "-o"),
    ("--error", "-e"), ("--wrap",), ("--parsable",), ("--wait", "-W"),
)  # fmt: skip


def _check_word(text: str) -> str:
    if not text or not text.isprintable():
        message = f"{text!r} is empty, or has control characters, which options of sbatch cannot have"
        raise InvalidValue(message, code="invalid-sbatch-option")
    return text


def _check_time(text: str | int) -> str:
    if not _TIME.fullmatch(str(text)):
        message = f"{text!r} is not a time limit: write minutes, 'hours:minutes:seconds' or 'days-hours'"
        raise InvalidValue(message, code="invalid-time-limit")
    return str(text)


def _check_option(text: str) -> str:
    _check_word(text)
    if not text.startswith("-"):
        message = f"{text!r} is not an option of sbatch: write it as '--name=value'"
        raise InvalidValue(message, code="invalid-sbatch-option")
    name = text.partition("=")[0].partition(" ")[0]
    for names in _SET_BY_TFDIST:
        if name in names or (len(name) > 2 and text[:2] in names):
            key = names[0].removeprefix("--")
            fix = f"write it as slurm.{key}" if key in SlurmSpec.model_fields else "remove it"
            raise InvalidValue(f"{names[0]} is set by tfdist: {fix}", code="reserved-sbatch-option")
    if name.startswith("--") and text.startswith(f"{name} "):
        message = f"{text!r} is one word to sbatch: write it as {text.replace(' ', '=', 1)!r}"
        raise InvalidValue(message, code="invalid-sbatch-option")
    return text


def _check_line(text: str) -> str:
    if "\0" in text:
        raise InvalidValue("a line of a shell script cannot contain a NUL", code="nul-in-value")
    return text


Word = Annotated[str, AfterValidator(_check_word)]


class SlurmSpec(SpecModel):
    """How the tasks are submitted to Slurm; each key before `extra` is the option of `sbatch` of that name."""

    partition: Word | None = None
    """The partition. As for all keys, the default is that of the Slurm cluster."""
    account: Word | None = None
    """The account that is charged."""
    qos: Word | None = None
    """The quality of service."""
    time: Annotated[str | int, AfterValidator(_check_time)] | None = None
    """The time limit: `minutes`, `hours:minutes:seconds` or `days-hours`. A minute before it, the training saves a
    checkpoint, and the job is requeued."""
    nodes: Annotated[int, Field(ge=1)] | None = None
    """The number of nodes; by default Slurm decides. Not allowed if roles need different resources."""
    constraint: Word | None = None
    """Features that the nodes must have."""
    gres: Word | None = None
    """Generic resources of each node, such as `gpu:2`, which its training tasks share. With `roles.worker.gpus` each
    task gets separate GPUs instead."""
    extra: list[Annotated[str, AfterValidator(_check_option)]] = []
    """Further options of sbatch, such as `--exclusive`."""
    setup: list[Annotated[str, AfterValidator(_check_line)]] = []
    """Shell commands to run on the first node before the tasks start, such as `module load cuda`."""
    python: Word | None = None
    """The Python on the nodes that has tfdist; by default the path of the Python that runs `tfdist`."""
