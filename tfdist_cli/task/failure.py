"""The report of a task's failure: to stderr, to error.json and to the launcher."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.errors import ExitCode, TfdistError, label
from tfdist_cli.protocol.masking import Mask
from tfdist_cli.protocol.records import TASK_DIR, emit
from tfdist_cli.train.tf_compat.op_errors import is_from_users_code, is_ours, is_users, shortened


def report(error: BaseException) -> int:
    """Reports a failure on stderr, in error.json and to the launcher.

    A `TfdistError` is reported as an error and a hint. An error of a TensorFlow op is reported with the op that failed.
    Any other error is a traceback; if it occurred in the user's code, without tfdist's own frames.

    Returns:
        The exit code.
    """
    failure = _describe(error)
    sys.stderr.write(failure.text)
    code = error.exit_code if isinstance(error, TfdistError) else ExitCode.FAILED
    folder = os.environ.get(TASK_DIR)
    if folder:
        text = Mask.from_environment().text(
            json.dumps(failure.fields | {"traceback": failure.traceback, "exit_code": int(code)}, indent=2)
        )
        with contextlib.suppress(OSError):  # the disk may be full; stderr has the report too
            Path(folder, "error.json").write_text(text, encoding="utf-8")
    no_retry = {} if getattr(error, "retry", True) else {"retry": False}
    emit("error", **failure.fields, traceback=failure.traceback[-1500:], **no_retry)
    return int(code)


@dataclass(frozen=True)
class _Failure:
    """A failure as it is reported.

    Args:
        fields: of the record and of error.json.
        text: for stderr.
        traceback: the traceback; empty for an error that the user can fix.
    """

    fields: dict[str, str | None]
    text: str
    traceback: str = ""


def _describe(error: BaseException) -> _Failure:
    if isinstance(error, TfdistError):
        text = f"{label(error.code)}: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")
        fields = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        return _Failure(fields | ({"code": error.code} if error.code else {}), text)
    if type(error).__module__.startswith("tensorflow.") and not is_from_users_code(error):
        short = shortened(error)
        fields = {"type": short.type, "message": short.message, "hint": None}
        return _Failure(fields, short.traceback, short.traceback)
    text = _traceback(error)
    return _Failure({"type": type(error).__name__, "message": str(error), "hint": None}, text, text)


def _traceback(error: BaseException) -> str:
    """Returns the traceback, from the user's outermost frame on if there is one."""
    whole = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = whole
    while part is not None:
        users = [frame for frame in part.stack if is_users(frame.filename)]
        if not users and hasattr(part, "text"):
            # A syntax error has its own position; the frames are those of the import.
            part.stack = traceback.StackSummary()
        elif users:
            # The frames above the user's outermost one are the caller's.
            start = list(part.stack).index(users[0])
            kept = [frame for frame in list(part.stack)[start:] if not is_ours(frame.filename)]
            part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(whole.format())
