"""The secrets of a run: read or generated at the launch, kept in memory only, and passed to each task at its start."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfdist_cli.protocol.masking import RUN_SECRET, Mask
from tfdist_cli.spec.roles import ROLES, Role
from tfdist_cli.spec.sections.cluster import Cluster
from tfdist_cli.spec.sections.secret import read_secrets


@dataclass(frozen=True)
class Secrets:
    """The values of a cluster's secrets, and the run's own secret.

    Args:
        values: role → variable → value.
        run: the secret with which tasks prove that they belong to this run. It begins with a character that output
            rarely ends with, so that masking rarely holds output back.
    """

    values: Mapping[Role, Mapping[str, str]] = field(default_factory=dict, repr=False)
    run: str = field(default_factory=lambda: f"~{secrets.token_hex(32)}", repr=False)

    @classmethod
    def read(cls, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Secrets:
        """Reads the secrets of every role that has tasks.

        Raises:
            UsageError: a secret has no value.
        """
        specs = {role: cluster.roles.of(role) for role in ROLES if cluster.roles.count(role)}
        return cls({role: read_secrets(spec.secrets, role, environ) for role, spec in specs.items() if spec})

    @property
    def mask(self) -> Mask:
        """Removes all of them from text: a task may also print the secret of another one."""
        return Mask((self.run, *(value for values in self.values.values() for value in values.values())))

    def environment(self, role: Role) -> Mapping[str, str]:
        """The environment variables of a role's tasks."""
        return {RUN_SECRET: self.run, **self.values.get(role, {})}
