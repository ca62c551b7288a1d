"""The columns of a table that a model trains on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfdist_cli.errors import UsageError

Features = Sequence[str] | Mapping[str, Sequence[str]]
"""The columns of the model's only input, or those of each input by its name."""


@dataclass(frozen=True)
class TableColumns:
    """The columns of a table.

    Args:
        features: the columns of the model's input, or of each input.
        label: the column of the targets.

    Raises:
        UsageError: features are no names of columns.
    """

    features: Features
    label: str

    def __post_init__(self) -> None:
        groups = self.features.values() if isinstance(self.features, Mapping) else [self.features]
        if not groups or not all(_are_names(group) for group in groups):
            raise UsageError(
                f"features is {self.features!r}, and has to be the names of columns",
                code="invalid-features",
                hint="write features=['a', 'b'], or features={'wide': ['a'], 'deep': ['b', 'c']} for named inputs",
            )

    @property
    def names(self) -> list[str]:
        """The names of all columns, each once."""
        return list(dict.fromkeys([*feature_names(self.features), self.label]))

    def check_in(self, columns: Iterable[str], table: str) -> None:
        """Checks that a table has the columns.

        Raises:
            UsageError: it lacks one.
        """
        have = list(columns)
        missing = [name for name in self.names if name not in have]
        if missing:
            raise UsageError(
                f"{table} has no column {missing[0]!r}: it has {', '.join(have)}",
                code="no-such-column",
                hint="check features and label",
            )


def feature_names(features: Features) -> list[str]:
    """Returns the columns of all inputs."""
    groups = features.values() if isinstance(features, Mapping) else [features]
    return [name for group in groups for name in group]


def not_numbers(name: str, found: object, label: str) -> UsageError:
    """Returns the error for a column that has no numbers.

    Args:
        name: the column.
        found: its type.
        label: the column of the targets.
    """
    how = "pyspark.ml.feature.StringIndexer or a dictionary turns class names into numbers"
    other = "convert it before, such as texts to class numbers, and decimals and times to float"
    return UsageError(
        f"the column {name!r} has values of the type {found}: a model trains on numbers, booleans, and lists of them "
        "with one length",
        code="column-not-numbers",
        hint=how if name == label else other,
    )


def _are_names(group: object) -> bool:
    return (
        isinstance(group, Sequence)
        and not isinstance(group, str)
        and bool(group)
        and all(isinstance(name, str) for name in group)
    )
