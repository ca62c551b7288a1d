"""`python -m tfdist_cli.task.health`: whether this container's task is up, for a container's health check.

A ps, a worker and the tasks of tf.data's service are up when their server answers. Any other task is up as long as its
process lives, and a container ends with its process.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import PurePath

import psutil

from tfdist_cli.protocol.run_files import parse_object
from tfdist_cli.spec.roles import ROLES

_LISTENING = [role for role, traits in ROLES.items() if traits.listens and not traits.drives]
_TIMEOUT = 5.0
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client of gRPC begins: HTTP/2's preface and an empty SETTINGS frame (RFC 9113, section 3.4)."""
_SETTINGS = 4


def main() -> int:
    """Prints what is wrong, if anything is, and returns 0 when nothing is."""
    for process in psutil.process_iter():
        try:
            argv = process.cmdline()
            if not serves(argv, os.environ):
                continue
            ports = {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
        if not any(answers(port) for port in ports):
            print(f"process {process.pid} serves nobody on {sorted(ports) or 'any port'}")  # noqa: T201 - its one result
            return 1
    return 0


def serves(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a command is `tfdist role` for a task that others connect to."""
    words = [PurePath(word).name for word in argv[:4]]
    program = next((number for number, word in enumerate(words) if word in ("tfdist", "tfdist_cli")), None)
    if program is None or words[program + 1 : program + 2] != ["role"]:
        return False
    named = [after for word, after in pairwise(argv) if word == "--task"]
    named += [word.removeprefix("--task=") for word in argv if word.startswith("--task=")]
    return (named[-1] if named else _task_of(environ)).partition(":")[0] in _LISTENING


def _task_of(environ: Mapping[str, str]) -> str:
    try:
        return str(parse_object(environ.get("TF_CONFIG", ""))["task"]["type"])
    except (ValueError, KeyError, TypeError):
        return ""


def answers(port: int) -> bool:
    """Whether a gRPC server on this port says hello: also a process that is stopped lets itself be connected to."""
    try:
        with socket.create_connection(("localhost", port), _TIMEOUT) as connection:
            connection.sendall(_HELLO)
            header = connection.recv(9, socket.MSG_WAITALL)
    except OSError:
        return False
    return len(header) == 9 and header[3] == _SETTINGS


if __name__ == "__main__":
    sys.exit(main())
