"""Derives findings from the results of an examination, by pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist_cli.doctor import host, network
from tfdist_cli.doctor.examine import HostResult
from tfdist_cli.finding import Finding
from tfdist_cli.spec.sections.cluster import Cluster


def findings_of(seen: Sequence[HostResult], cluster: Cluster | None = None, *, trains: bool = True) -> list[Finding]:
    """Returns all findings, errors first.

    Args:
        seen: the results of each host.
        cluster: the cluster; None if only this machine is examined.
        trains: whether the tasks train a recipe, which requires TensorFlow.
    """
    found = [network.no_answer_finding(one) for one in seen if one.no_answer]
    answering = [one for one in seen if not one.no_answer]
    for one in answering:
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
    found += host.version_findings(answering, trains=trains)
    found += network.connection_findings(answering)
    return sorted(found, key=lambda finding: finding.level)


def as_json(seen: Sequence[HostResult], found: Sequence[Finding]) -> dict[str, Any]:
    """Returns results and findings in plain JSON types."""
    return {
        "ok": not any(finding.level == "error" for finding in found),
        "hosts": [
            {
                "name": one.site.name,
                "tasks": [str(task) for task in one.site.tasks],
                "reached": one.no_answer is None,
                "clock_seconds": round(one.clock[0], 3),
                "ports": {str(task): dict(result) for task, result in one.ports.items()},
                "connections": [
                    {
                        "task": str(connection.task),
                        "address": str(connection.address),
                        "error": connection.error,
                        "right": connection.right,
                    }
                    for connection in one.connections
                ],
                "facts": dict(one.facts),
            }
            for one in seen
        ],
        "findings": [vars(finding) for finding in found],
    }
