"""One task in this process, from start to exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

from tfdist_cli.errors import ExitCode, ResultNotSaved, TfdistError, UsageError
from tfdist_cli.protocol import task_events
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.protocol.records import OUTLASTS, emit
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task.failure import report

_COORDINATOR_LOGS = ("encountered the following error when processing", "Start cancelling closures due to error")
"""Messages that TensorFlow's coordinator logs for an error that it also raises."""


def run_task(recipe: Recipe | None) -> int:
    """Runs the task that the environment describes, in this process.

    Args:
        recipe: the recipe to train; a task that only runs a server needs none.

    Returns:
        The exit code.
    """
    _set_up_logging()
    signal.signal(signal.SIGTERM, _exit_on_sigterm)  # the kernel ignores unhandled signals to a container's process 1
    try:
        emit("state", state="starting")
        _run(recipe)
    except SystemExit as error:
        code = error.code
        return code if isinstance(code, int) else ExitCode.DONE if code is None else ExitCode.FAILED
    except TfdistError as error:
        return report(error)
    except Exception as error:  # noqa: BLE001 the user's code may raise any error; all are reported
        return report(error)
    return ExitCode.DONE


def _run(recipe: Recipe | None) -> None:
    environment = Environment.read()
    if environment.serves:
        if os.environ.get(OUTLASTS) == "1":
            signal.signal(
                signal.SIGTERM, signal.SIG_IGN
            )  # the chief saves a checkpoint, and needs its servers for that
        from tfdist_cli.train.cluster.join import serve  # noqa: PLC0415 a task with a usage error fails before TensorFlow is imported

        serve(environment)
        emit("state", state="done")
        return
    if recipe is None:
        raise UsageError(
            f"{environment.task} is to train, and no recipe is given",
            code="no-recipe",
            hint="give one with --recipe, or with 'recipe' in the cluster file",
        )
    from tfdist_cli.task.recipe import run_recipe  # noqa: PLC0415 as above
    from tfdist_cli.train.cluster.join import join, leave_together  # noqa: PLC0415 as above

    # TensorFlow's warnings are about how tfdist uses it: the user cannot act on them. Its errors are shown.
    tensorflow_log = logging.getLogger("tensorflow")
    tensorflow_log.setLevel(logging.ERROR)
    tensorflow_log.addFilter(_is_not_raised_too)
    context = join(environment, lost=lambda error: exit_now(report(error)))
    try:
        run_recipe(context, recipe)
    except ResultNotSaved:
        leave_together(context)  # the training is complete on all tasks
        raise
    emit("state", state="done")  # before the servers of this task notice that it leaves, and exit
    leave_together(context)


def _is_not_raised_too(record: logging.LogRecord) -> bool:
    """Returns whether to show a log record: the coordinator also raises what it logs, and `report` reports that."""
    return not any(text in record.getMessage() for text in _COORDINATOR_LOGS)


def exit_now(code: int) -> None:
    """Exits the process without waiting for TensorFlow's threads for remote tasks, which may never finish."""
    task_events.exited(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_up_logging() -> None:
    log = logging.getLogger("tfdist")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _exit_on_sigterm(_number: int, _frame: FrameType | None) -> None:
    exit_now(ExitCode.TERMINATED)
