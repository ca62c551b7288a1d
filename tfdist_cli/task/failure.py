"""How a task says why it failed: once, in the words of whoever has to act on it."""

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
    """Writes a failure to standard error, to error.json and to the launcher.

    A mistake that tfdist recognises is an error and a hint; an operation of TensorFlow's that failed is what failed in
    it; anything else is a traceback, without tfdist's own frames where it happened in the user's code.

    Returns:
        The exit code.
    """
    told = _told(error)
    sys.stderr.write(told.written)
    code = error.exit_code if isinstance(error, TfdistError) else ExitCode.FAILED
    folder = os.environ.get(TASK_DIR)
    if folder:
        text = Mask.from_environment().text(
            json.dumps(told.fields | {"traceback": told.traceback, "exit_code": int(code)}, indent=2)
        )
        with contextlib.suppress(OSError):  # a full disk, perhaps: what was written to standard error says it too
            Path(folder, "error.json").write_text(text, encoding="utf-8")
    again = {} if getattr(error, "retry", True) else {"retry": False}
    emit("error", **told.fields, traceback=told.traceback[-1500:], **again)
    return int(code)


@dataclass(frozen=True)
class _Told:
    """A failure in its three forms."""

    fields: dict[str, str | None]
    written: str
    traceback: str = ""


def _told(error: BaseException) -> _Told:
    if isinstance(error, TfdistError):
        written = f"{label(error.code)}: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else "")
        fields = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
        return _Told(fields | ({"code": error.code} if error.code else {}), written)
    if type(error).__module__.startswith("tensorflow.") and not is_from_users_code(error):
        short = shortened(error)
        fields = {"type": short.type, "message": short.message, "hint": None}
        return _Told(fields, short.traceback, short.traceback)
    text = _traceback(error)
    return _Told({"type": type(error).__name__, "message": str(error), "hint": None}, text, text)


def _traceback(error: BaseException) -> str:
    told = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = told
    while part is not None:
        users = [frame for frame in part.stack if is_users(frame.filename)]
        if not users and hasattr(part, "text"):
            # A syntax error names its own place; the frames are those of whoever imported the file.
            part.stack = traceback.StackSummary()
        elif users:
            # From the user's outermost frame on: above it are the frames of whoever called the user.
            start = list(part.stack).index(users[0])
            kept = [frame for frame in list(part.stack)[start:] if not is_ours(frame.filename)]
            part.stack = traceback.StackSummary.from_list(kept)
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)
    return "".join(told.format())
