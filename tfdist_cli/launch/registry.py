"""Imports the launcher that a cluster names."""

from __future__ import annotations

from importlib import import_module

from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.spec.sections.cluster import Cluster


def launcher_of(cluster: Cluster) -> Launcher:
    """Returns a new launcher for the cluster's tasks."""
    module, _, name = cluster.launcher_traits.implementation.partition(":")
    launcher: Launcher = getattr(import_module(module), name)()
    return launcher
