"""Runs in a slot of the engine: starts the agent, whose connection to the launcher is its stdin and stdout."""

from __future__ import annotations

import subprocess
import sys

from tfdist_cli.launch.slots.handshake import Caller, connect
from tfdist_cli.launch.ssh.command import AGENT


def run_agent(launcher: tuple[str, int], secret: str, caller: Caller) -> None:
    """Runs an agent until the launcher ends the connection.

    Raises:
        OSError: the launcher cannot be reached.
        RuntimeError: the agent has failed. The engine reports it.
    """
    with connect(launcher, secret, caller) as connection:
        end = connection.fileno()
        agent = subprocess.Popen([sys.executable, "-m", AGENT], stdin=end, stdout=end)
    try:
        code = agent.wait()
    finally:
        agent.kill()
    if code:
        raise RuntimeError(f"the agent of slot {caller.slot} exited with code {code}")
