"""One task from its first line to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType

from tfdist_cli.errors import ExitCode, ResultNotSaved, TfdistError, UsageError
from tfdist_cli.protocol.environment import Environment
from tfdist_cli.protocol.records import OUTLASTS, emit
from tfdist_cli.spec.sections.recipe import Recipe
from tfdist_cli.task.failure import report

_RAISED = ("encountered the following error when processing", "Start cancelling closures due to error")
"""What TensorFlow's coordinator logs of an error that it raises, too."""


def run_task(recipe: Recipe | None) -> int:
    """Runs the task that the environment describes, in this process.

    Args:
        recipe: what the task trains; a server needs none.

    Returns:
        The exit code.
    """
    _set_up_logging()
    signal.signal(signal.SIGTERM, _end)  # process 1 of a container ignores what it has no handler for
    try:
        emit("state", state="starting")
        _run(recipe)
    except SystemExit as ending:
        code = ending.code
        return code if isinstance(code, int) else ExitCode.DONE if code is None else ExitCode.FAILED
    except TfdistError as error:
        return report(error)
    except Exception as error:  # noqa: BLE001 the user's code raises what it likes; all of it is reported
        return report(error)
    return ExitCode.DONE


def _run(recipe: Recipe | None) -> None:
    environment = Environment.read()
    if environment.serves:
        if os.environ.get(OUTLASTS) == "1":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the chief saves, and needs those that serve it for that
        from tfdist_cli.train.cluster.join import serve  # noqa: PLC0415 a task that cannot start says so at once

        serve(environment)
        emit("state", state="done")
        return
    if recipe is None:
        raise UsageError(
            f"{environment.task} trains, but no recipe says what",
            hint="name one with --recipe, or in the cluster file's 'recipe'",
        )
    from tfdist_cli.task.recipe import run_recipe  # noqa: PLC0415 as above
    from tfdist_cli.train.cluster.join import join, leave_together  # noqa: PLC0415 as above

    # Its warnings are about how tfdist uses TensorFlow, which a user can do nothing about; its errors stay.
    noise = logging.getLogger("tensorflow")
    noise.setLevel(logging.ERROR)
    noise.addFilter(_told_by_us)
    joined = join(environment, lost=lambda error: leave(report(error)))
    try:
        run_recipe(joined, recipe)
    except ResultNotSaved:
        leave_together(joined)  # the training is done, for all of them
        raise
    emit("state", state="done")  # before those that serve this task hear of it, and end
    leave_together(joined)


def _told_by_us(record: logging.LogRecord) -> bool:
    """The coordinator logs what it then raises; it is told once, when it has reached the end of the task."""
    return not any(told in record.getMessage() for told in _RAISED)


def leave(code: int) -> None:
    """Ends the process at once: TensorFlow's threads for remote tasks may never come to an end by themselves."""
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


def _end(_number: int, _frame: FrameType | None) -> None:
    leave(ExitCode.TERMINATED)
