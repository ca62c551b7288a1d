"""Ends the containers of a run, and removes its network, when the launcher lets go of it, however it went.

Run as a script, by an isolated interpreter: `last_will.py ENGINE LABEL NETWORK`. Standard input is a pipe from the
launcher, which the kernel closes when the launcher dies, SIGKILL included. What is left then gets SIGTERM, and after
`GRACE` seconds SIGKILL.
"""

import signal
import subprocess
import sys
import time

GRACE = 3
_TRIES = 20
"""How often it is looked for containers: a client may be about to start one, as long as there is a network for it."""


def main() -> int:
    """Waits for the end of the pipe, and carries out what is left to do; 0 when nothing of the run is left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    engine, label, network = sys.argv[1:]
    sys.stdin.buffer.read()
    for _ in range(_TRIES):
        found = _run(engine, "ps", "--all", "--quiet", "--filter", f"label={label}").stdout.split()
        if found:
            _run(engine, "stop", "--time", str(GRACE), *found)
            _run(engine, "rm", "--force", *found)
        if _run(engine, "network", "rm", network).returncode == 0:
            return 0
        if _run(engine, "network", "inspect", network).returncode:
            return 0
        time.sleep(0.25)
    return 1


def _run(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
