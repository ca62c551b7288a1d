"""The secrets of a run: read or made when it is launched, kept in memory alone, and given to each task that starts."""

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
    """The values of a cluster's secrets, and the run's own.

    Args:
        values: role → variable → value.
        run: what tasks prove to each other with that they are of this run. Text seldom ends like its beginning, so that
            masking it keeps no output back.
    """

    values: Mapping[Role, Mapping[str, str]] = field(default_factory=dict, repr=False)
    run: str = field(default_factory=lambda: f"~{secrets.token_hex(32)}", repr=False)

    @classmethod
    def read(cls, cluster: Cluster, environ: Mapping[str, str] = os.environ) -> Secrets:
        """Reads those of every role that has tasks.

        Raises:
            UsageError: one of them has no value.
        """
        specs = {role: cluster.roles.of(role) for role in ROLES if cluster.roles.count(role)}
        return cls({role: read_secrets(spec.secrets, role, environ) for role, spec in specs.items() if spec})

    @property
    def mask(self) -> Mask:
        """Takes all of them out of text: a task may also print what another one was given."""
        return Mask((self.run, *(value for values in self.values.values() for value in values.values())))

    def environment(self, role: Role) -> Mapping[str, str]:
        """The variables of a role's tasks."""
        return {RUN_SECRET: self.run, **self.values.get(role, {})}
