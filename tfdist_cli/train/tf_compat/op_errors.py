"""TensorFlow's errors in short, and whose code they come from: tfdist's, a library's, or the user's."""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

_HEADER = "Traceback (most recent call last):\n"
_FRAME = re.compile(r'  File "(?P<file>[^"\n]+)", line \d+, in .+\n(?:    .*\n)*\n?')
_LAST = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?\n")
_FRAMES = re.compile(
    r"Detected at node (?P<node>\S+) defined at \(most recent call last\):\n(?P<frames>(?:  File .+\n+)+)"
)
_FILE = re.compile(r'  File "([^"]+)", .+\n')
_NOISE = (
    (re.compile(r"Graph execution error:\s*"), ""),
    (re.compile(r"Detected at node \S+ defined at \(most recent call last\):\n<stack traces unavailable>\s*"), ""),
    (re.compile(r"\d+ root error\(s\) found\.\s*\(0\) \w+:\s*"), ""),
    (re.compile(r"\{\{function_node [^}]*\}\} "), ""),
    (re.compile(r"Error in user-defined function passed to (\w+)Dataset\S* transformation with iterator: \S+: "),
     r"in a function of the data (\1): "),
)  # fmt: skip
_KERAS = re.compile(r"Exception encountered when calling [^\n]*\n+|\x1b\[\d+m|\n+Arguments received by[\s\S]*")
"""What Keras adds to the message of an error in a layer: its name, the arguments of the call, and colours."""
_END = re.compile(r"\n?\s*(\[\[\{\{node|\[Op:|\(\d+\) [A-Z_]+:|Additional GRPC error information)")
_WORKER = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")
_LOST_PS = re.compile(r"remote target /job:ps/(?:replica:\d+/)?task:(\d+)")
"""The text of a worker's error if a ps does not answer: the ps failed, not the worker."""
_OLDER_RESOURCE = ("/job:localhost/replica:0/task:0", "Haven't set up remote eager worker in this eager context")
_OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_INSTALLED = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
)  # not all of sys.prefix: below /usr there may be a user's own program
_LIBRARIES = tuple(
    f"{Path(spec.origin).parent}{os.sep}"
    for spec in map(importlib.util.find_spec, ("tensorflow", "keras"))  # finding imports nothing
    if spec and spec.origin
)
"""TensorFlow and Keras, which may lie in any folder of `PYTHONPATH` (`pip install --target`)."""

_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of packages, which may also be another Python's (`--system-site-packages`) or the user's (`--user`)."""


@dataclass(frozen=True)
class OpError:
    """A short form of the error of an operation.

    Args:
        type: the class name of the error; the user's own class if the user's Python code raised it.
        message: the message.
        traceback: the traceback as Python would have printed it on the task that raised the error.
    """

    type: str
    message: str
    traceback: str


def shortened(error: BaseException) -> OpError:
    """Shortens an error of TensorFlow.

    If Python code inside an operation (`tf.py_function`, a generator) fails, the operation fails. The text then has the
    Python traceback once for each function and host through which the operation was called.
    """
    text = str(error)
    found = _python_error(text)
    if found:
        return found
    where = _where(error, text)
    defined = _FRAMES.search(text)
    text = _FRAMES.sub("", text)
    for noise, instead in _NOISE:
        text = noise.sub(instead, text)
    end = _END.search(text)
    name, message = type(error).__name__, where + (text[: end.start()] if end else text).strip()
    frames = [frame[0] for frame in _FILE.finditer(defined["frames"]) if is_users(frame[1])] if defined else []
    head = _HEADER + "".join(frames) if frames else ""
    return OpError(name, message, f"{head}{name}: {message}\n")


def lost_ps(error: BaseException) -> str:
    """Returns the ps whose failure an error follows from, such as `ps:0`; empty if it is none."""
    found = _LOST_PS.search(str(error)) if type(error).__name__ == "UnavailableError" else None
    return f"ps:{found[1]}" if found else ""


def message_of(error: BaseException) -> str:
    """Returns the message of an error without what Keras adds to it."""
    return _KERAS.sub("", str(error)).strip()


def summary(error: BaseException) -> str:
    """Returns the first line of an error's message; the name of its class if it has none."""
    lines = _KERAS.sub("", shortened(error).message).split("\n")
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)


def comes_from_users_code(error: BaseException) -> bool:
    """Whether an operation that failed was created or called by the user's code within a step."""
    text = str(error)
    if _python_error(text):
        return True
    defined = _FRAMES.search(text)
    files = [frame[1] for frame in _FILE.finditer(defined["frames"])] if defined else []
    ours = max((place for place, file in enumerate(files) if is_ours(file)), default=len(files))
    return any(is_users(file) for file in files[ours:])


def _where(error: BaseException, text: str) -> str:
    """Returns the task that failed, as a prefix of the message; empty if the error names none."""
    ps, worker = lost_ps(error), _WORKER.search(text)
    return f"{ps}: " if ps else f"worker:{worker[1]}: " if worker else ""


def _python_error(text: str) -> OpError | None:
    start = text.find(_HEADER)
    if start < 0:
        return None
    place = start + len(_HEADER)
    while text[place : place + 1] == "\n":
        place += 1
    frames: list[tuple[str, str]] = []
    while frame := _FRAME.match(text, place):
        frames.append((frame["file"], frame[0].rstrip("\n") + "\n"))
        place = frame.end()
    last = _LAST.match(text, place)
    if not last:
        return None
    users = next((number for number, (file, _) in enumerate(frames) if is_users(file)), 0)
    kept = "".join(lines for file, lines in frames[users:] if not is_ours(file))
    return OpError(last["type"], last["message"] or "", _HEADER + kept + last[0])


def is_of_older_resource(error: BaseException) -> bool:
    """Whether an operation failed that uses a table or a variable from before this task got its name in the cluster.

    Seen in TensorFlow 2.21.0: the texts of these errors. Reason: they have no class or code of their own. Replace with:
    a runtime whose devices keep their names.
    """
    return any(text in str(error) for text in _OLDER_RESOURCE)


def is_ours(filename: str) -> bool:
    """Whether a file is part of tfdist."""
    return filename.startswith(_OURS)


def is_users(filename: str) -> bool:
    """Whether a file is neither tfdist's nor a library's."""
    if filename.startswith(("<", _OURS, *_INSTALLED, *_LIBRARIES)):
        return False
    return _PACKAGES.isdisjoint(Path(filename).parts)


def is_from_users_code(error: BaseException) -> bool:
    """Whether an error was raised in the user's code, or below it, after the frame that caught it."""
    return any(is_users(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
