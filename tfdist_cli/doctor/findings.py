"""What was seen of the hosts → all that is wrong with them, each with its fix: pure functions of facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist_cli.doctor import host, network
from tfdist_cli.doctor.examine import Seen
from tfdist_cli.doctor.finding import Finding
from tfdist_cli.spec.sections.cluster import Cluster


def findings_of(seen: Sequence[Seen], cluster: Cluster | None = None, *, trains: bool = True) -> list[Finding]:
    """All that is wrong, errors first.

    Args:
        seen: what was seen of each host.
        cluster: what is to run there; None when there is no more to know than this machine.
        trains: whether the tasks train a recipe, which needs TensorFlow.
    """
    found = [network.silence_finding(one) for one in seen if one.silence]
    awake = [one for one in seen if not one.silence]
    for one in awake:
        needed = trains and (cluster is None or bool(one.site.tasks))
        found += host.software_findings(one, needed=needed)
        found += host.folder_findings(one)
        found += host.memory_findings(one, cluster)
        found += host.gpu_findings(one, cluster)
        found += host.clock_findings(one)
        found += host.proxy_findings(one, cluster)
        found += network.name_findings(one)
        found += network.port_findings(one)
        found += network.exposure_findings(one, cluster)
    found += host.version_findings(awake, trains=trains)
    found += network.reach_findings(awake)
    return sorted(found, key=lambda finding: finding.level)


def as_json(seen: Sequence[Seen], found: Sequence[Finding]) -> dict[str, Any]:
    """All that was seen and found, in plain JSON types."""
    return {
        "ok": not any(finding.level == "error" for finding in found),
        "hosts": [
            {
                "name": one.site.name,
                "tasks": [str(task) for task in one.site.tasks],
                "reached": one.silence is None,
                "clock_seconds": round(one.clock[0], 3),
                "ports": {str(task): dict(told) for task, told in one.ports.items()},
                "connections": [
                    {"task": str(reach.task), "address": str(reach.address), "error": reach.error, "right": reach.right}
                    for reach in one.reached
                ],
                "facts": dict(one.facts),
            }
            for one in seen
        ],
        "findings": [vars(finding) for finding in found],
    }
