"""The name of one task of a cluster: `role:index`."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist_cli.errors import InvalidValue
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
            InvalidValue: the role is unknown or the index is not a number.
        """
        name, colon, index = text.partition(":")
        role = next((role for role in ROLES if role == name), None)
        if role is None:
            message = f"{text!r} is not a task: expected 'role:index', with a role of {', '.join(ROLES)}"
            raise InvalidValue(message, code="unknown-task")
        if colon and not (index.isascii() and index.isdigit()):
            message = f"{text!r} is not a task: the index after ':' is a number from 0"
            raise InvalidValue(message, code="unknown-task")
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
