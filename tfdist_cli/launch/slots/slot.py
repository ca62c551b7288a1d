"""Runs in a slot of the engine: starts the agent, whose connection to the launcher is its stdin and stdout."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

from tfdist_cli.launch.slots.handshake import Caller, connect
from tfdist_cli.launch.ssh.command import AGENT

_COPYING_SECONDS = 5.0
"""How long to wait for the end of an agent's stderr: a process that outlives the agent may hold it open."""


def run_agent(launcher: tuple[str, int], secret: str, caller: Caller) -> None:
    """Runs an agent until the launcher ends the connection.

    Raises:
        OSError: the launcher cannot be reached.
        RuntimeError: the agent has failed. The engine reports it, with the last line that the agent has written.
    """
    with connect(launcher, secret, caller) as connection:
        end = connection.fileno()
        agent = subprocess.Popen(
            [sys.executable, "-m", AGENT], stdin=end, stdout=end, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    last = [""]
    copying = threading.Thread(target=_copy, args=(agent.stderr, last), daemon=True)
    copying.start()
    try:
        code = agent.wait()
    finally:
        agent.kill()
    copying.join(_COPYING_SECONDS)
    if code:
        raise RuntimeError(f"the agent of slot {caller.slot} exited with code {code}: {last[0]}")


def _copy(lines: Any, last: list[str]) -> None:
    """Writes the agent's stderr to the engine's log, and notes its last line."""
    for line in lines:
        sys.stderr.write(line)
        last[0] = line.strip() or last[0]
