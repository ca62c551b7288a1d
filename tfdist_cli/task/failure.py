"""How a task says why it failed: once, in the words of whoever has to act on it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from tfdist_cli.errors import ExitCode, TfdistError
from tfdist_cli.records import emit
from tfdist_cli.train.blame import is_ours, is_users

TASK_DIR = "TFDIST_TASK_DIR"
"""Where a launcher wants a task's error.json."""


def report(error: BaseException) -> int:
    """Writes a failure to standard error, to error.json and to the launcher.

    A mistake that tfdist recognises is an error and a hint; anything else is a traceback, without tfdist's own frames
    where it happened in the user's code.

    Returns:
        The exit code.
    """
    known = isinstance(error, TfdistError)
    text = "" if known else _traceback(error)
    failure: dict[str, Any] = {
        "type": type(error).__name__,
        "message": error.message if isinstance(error, TfdistError) else str(error),
        "hint": error.hint if isinstance(error, TfdistError) else None,
    }
    if isinstance(error, TfdistError):
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
    else:
        sys.stderr.write(text)
    code = error.exit_code if isinstance(error, TfdistError) else ExitCode.FAILED
    folder = os.environ.get(TASK_DIR)
    if folder:
        told = json.dumps(failure | {"traceback": text, "exit_code": int(code)}, indent=2)
        with contextlib.suppress(OSError):  # a full disk, perhaps: what was written to standard error says it too
            Path(folder, "error.json").write_text(told, encoding="utf-8")
    emit("error", **failure, traceback=text[-1500:])
    return int(code)


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
