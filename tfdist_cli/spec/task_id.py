"""The name of one task of a cluster: `role:index`."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist_cli.spec.roles import ROLES, Role, RoleTraits


@dataclass(frozen=True)
class TaskId:
    """One task, such as `worker:1`.

    Args:
        role: what it does, a key of `ROLES`.
        index: its number among the tasks of its role, from 0.
    """

    role: Role
    index: int = 0

    @classmethod
    def parse(cls, text: str) -> TaskId:
        """Reads `role:index`, or `role` for its first task.

        Raises:
            ValueError: the role is unknown or the index is not a number.
        """
        name, colon, index = text.partition(":")
        role = next((role for role in ROLES if role == name), None)
        if role is None:
            raise ValueError(f"{text!r} names no task: a task is 'role:index' with a role of {', '.join(ROLES)}")
        if colon and not (index.isascii() and index.isdigit()):
            raise ValueError(f"{text!r} names no task: the index after ':' is a number from 0")
        return cls(role, int(index) if colon else 0)

    @property
    def traits(self) -> RoleTraits:
        """What tasks of its role do."""
        return ROLES[self.role]

    @property
    def slug(self) -> str:
        """The name in paths: `worker-1`."""
        return f"{self.role}-{self.index}"

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"
