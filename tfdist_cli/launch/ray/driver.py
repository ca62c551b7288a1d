"""The driver in the Ray cluster: a placement group, and an actor with an agent in each of its bundles."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from typing import Any
from urllib.parse import urlsplit

from tfdist_cli.launch.slots.driver_errors import DriverError, error_line, missing_package
from tfdist_cli.launch.slots.handshake import DRIVER, SECRET, Caller, connect, exit_with
from tfdist_cli.launch.slots.slot import run_agent

_CONNECT_SECONDS = 10.0


class Slot:
    """The actor of one slot."""

    def host(self) -> str:
        """Returns the address of the actor's node: the actor is up."""
        import ray  # noqa: PLC0415 only the cluster's Python has it

        return str(ray.util.get_node_ip_address())

    def run(self, launcher: tuple[str, int], secret: str, slot: int, host: str) -> None:
        """Runs the slot's agent until the launcher ends it."""
        run_agent(launcher, secret, Caller(slot, host))


def main() -> int:
    """Runs the actors until their agents have exited; returns the exit code."""
    address, settings = sys.argv[1], json.loads(sys.argv[2])
    host, _, port = address.rpartition(":")
    launcher, secret = (host, int(port)), os.environ.pop(SECRET)
    control = connect(launcher, secret, Caller(DRIVER, socket.gethostname()))
    # Ray ends the actors of a driver that exits.
    threading.Thread(target=exit_with, args=(control,), daemon=True).start()
    try:
        error = _run(launcher, secret, settings)
    except Exception as failure:  # noqa: BLE001 all are for the launcher
        error = _driver_error(failure)
    if error:
        sys.stdout.write(error_line(error))
        sys.stdout.flush()
    return 1 if error else 0


def _run(launcher: tuple[str, int], secret: str, settings: dict[str, Any]) -> DriverError | None:
    import ray  # noqa: PLC0415 the launcher checks for it
    from ray.util.placement_group import placement_group  # noqa: PLC0415
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    host, port = head(settings["address"])
    if host:  # Ray itself tries for minutes
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    ray.init(address=settings["address"], log_to_driver=False, namespace="tfdist")
    bundles = settings["bundles"]
    group = placement_group(bundles, strategy=settings["strategy"], name=settings["name"])
    if not group.wait(settings["seconds"]):
        return DriverError(
            f"it has not placed {len(bundles)} tasks within {settings['seconds']} s, with {json.dumps(bundles)}",
            "too-few-slots",
            "lower the replicas, cpus, gpus or memory of roles, or add nodes; `ray status` shows what is free",
            usage=True,
        )
    slots = [
        ray.remote(Slot)
        .options(
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            memory=needs.get("memory"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        .remote()
        for index, needs in enumerate(bundles)
    ]
    hosts = ray.get([slot.host.remote() for slot in slots])
    running = [
        slot.run.remote(launcher, secret, index, host)
        for index, (slot, host) in enumerate(zip(slots, hosts, strict=True))
    ]
    while running:
        ended, running = ray.wait(running)
        ray.get(ended)
    ray.shutdown()
    return None


def head(address: str) -> tuple[str, int]:
    """Returns host and port of the head node; empty, and any port, if the address names none."""
    url = urlsplit(address if "://" in address else f"//{address}")
    try:
        return (url.hostname or "", url.port) if url.port else ("", 1)
    except ValueError:
        return "", 1


def _driver_error(error: Exception) -> DriverError:
    if missing := missing_package(
        str(error), "on a node", "install tfdist with all its packages in the Python environment of Ray on all nodes"
    ):
        return missing
    if isinstance(error, OSError | ValueError):
        return DriverError(
            f"the cluster cannot be reached: {_summary(error)}",
            "ray-unreachable",
            "check ray.address in the cluster file, and `ray status` there",
            usage=True,
        )
    return DriverError(_summary(error), "slots-lost", "see the logs of Ray, such as with `ray logs cluster`")


def _summary(error: Exception) -> str:
    """Returns the first line that says more than the name of an error's class, and the last one if it leads to it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next(iter(lines), type(error).__name__)
    return f"{first} {lines[-1]}" if first.endswith(":") and len(lines) > 1 else first


if __name__ == "__main__":
    sys.exit(main())
