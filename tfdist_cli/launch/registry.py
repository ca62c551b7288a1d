"""Which launchers there are, by the names that a cluster file and `--on` give them."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist_cli.launch.compose.launcher import ComposeLauncher
from tfdist_cli.launch.kubernetes.launcher import KubernetesLauncher
from tfdist_cli.launch.local.launcher import LocalLauncher
from tfdist_cli.launch.slurm.launcher import SlurmLauncher
from tfdist_cli.launch.ssh.launcher import SshLauncher
from tfdist_cli.launch.supervisor.launcher import Launcher
from tfdist_cli.spec.sections.cluster import Cluster, LauncherName

LAUNCHERS: Mapping[LauncherName, type[Launcher]] = {
    "local": LocalLauncher,
    "ssh": SshLauncher,
    "slurm": SlurmLauncher,
    "compose": ComposeLauncher,
    "kubernetes": KubernetesLauncher,
}
"""Each is one module, or one package."""


def launcher_of(cluster: Cluster) -> Launcher:
    """What starts the cluster's tasks."""
    return LAUNCHERS[cluster.launcher]()
