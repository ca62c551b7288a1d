"""The order to profile a running task: a file in the task's folder. Its launcher writes it, the task takes it.

A task looks for it with each heartbeat, and so listens at no port for it. It answers with the record `profiled` or
`profile_failed`, see `records`.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from tfdist_cli.protocol.run_files import number, read_object

ORDER_FILE = "profile.json"
PROFILE_FOLDER = PurePosixPath("profile")
"""The folder of profiles in a run's directory, and TensorBoard's folder for them."""
PROFILES = PROFILE_FOLDER / "plugins" / "profile"
"""There, TensorBoard looks for a folder for each time, with a file for each machine; here it is one for each task."""
PROFILE_SUFFIX = ".xplane.pb"


@dataclass(frozen=True)
class ProfileOrder:
    """What to profile.

    Args:
        request: the id of the request, which the answer refers to.
        seconds: how long.
        path: where the profile is stored: relative to the run's directory, with '/'.
    """

    request: str
    seconds: float
    path: str


def write_order(folder: Path, order: ProfileOrder) -> None:
    """Gives a task an order; a task whose folder cannot be written gets none, and does not answer."""
    with suppress(OSError):
        new = folder / f".{ORDER_FILE}.new"
        new.write_text(json.dumps(asdict(order)), encoding="utf-8")
        new.replace(folder / ORDER_FILE)


def take_order(folder: Path) -> ProfileOrder | None:
    """Takes the order out of a task's folder; None if there is none."""
    path = folder / ORDER_FILE
    with suppress(OSError, ValueError):
        value = read_object(path)
        path.unlink()
        seconds = number(value.get("seconds"))
        if seconds is not None and seconds > 0:
            return ProfileOrder(str(value.get("request")), seconds, str(value.get("path")))
    return None
