"""Stops and removes the containers of a run, and its network.

A script for an isolated interpreter: `remove_containers.py ENGINE LABEL NETWORK`. Containers that are still running get
SIGTERM, and SIGKILL after `GRACE` seconds.
"""

import subprocess
import sys
import time

GRACE = 3
_TRIES = 20
"""How often containers are listed: as long as the network exists, an engine's client may still start one."""


def main() -> int:
    """Returns 0 if the network and all containers are removed."""
    engine, label, network = sys.argv[1:]
    for _ in range(_TRIES):
        containers = _run(engine, "ps", "--all", "--quiet", "--filter", f"label={label}").stdout.split()
        if containers:
            _run(engine, "stop", "--time", str(GRACE), *containers)
            _run(engine, "rm", "--force", *containers)
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
