"""Which data a training is validated on, and when."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.train.data.inputs import Inputs
from tfdist_cli.train.data.shard import DatasetFunction
from tfdist_cli.train.trainer.arguments import check_counts


@dataclass(frozen=True)
class Validation:
    """The data that the model is evaluated on after epochs.

    Args:
        data: a function of a shard that returns its batches; in a program, everything that `tfdist.fit` takes as data.
        steps: batches to evaluate; None for all of them.
        every_epochs: evaluate after every so many epochs, and at the end of the training.
        name: the split's name in metrics.jsonl.
        at_epochs: evaluate after these epochs only, counted from 1.
    """

    data: DatasetFunction
    steps: int | None = None
    every_epochs: int = 1
    name: str = "validation"
    at_epochs: Container[int] | None = None

    def __post_init__(self) -> None:
        check_counts(1, steps=self.steps, every_epochs=self.every_epochs)

    def is_due(self, epoch: int, *, last: bool) -> bool:
        """Whether to evaluate after an epoch.

        Args:
            epoch: counted from 1.
            last: whether the training ends with it.
        """
        return last or epoch % self.every_epochs == 0 if self.at_epochs is None else epoch in self.at_epochs


@dataclass(frozen=True)
class ValidationArguments:
    """The arguments, under Keras's names, as `tfdist.fit` documents them.

    Raises:
        UsageError: a value is invalid.
    """

    validation_data: Any = None
    validation_split: Any = 0.0
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_counts(1, validation_steps=self.validation_steps, validation_batch_size=self.validation_batch_size)
        fraction = self.validation_split
        if not isinstance(fraction, (int, float)) or not 0 <= fraction < 1:
            raise UsageError(
                f"validation_split must be a number from 0 to less than 1, got {fraction!r}", code="invalid-argument"
            )
        listed = isinstance(self.validation_freq, (list, tuple, set))
        for epoch in self.validation_freq if listed else [self.validation_freq]:
            check_counts(1, validation_freq=epoch)
        if isinstance(self.validation_data, Validation) and (self.validation_steps or self.validation_freq != 1):
            raise UsageError(
                "validation_data is a tfdist.Validation, which has its own steps and epochs",
                code="validation-given-twice",
                hint="remove validation_steps and validation_freq, or pass the data alone",
            )

    def divide(self, data: Inputs, *, by_chief: bool = False) -> tuple[Inputs, Validation | None]:
        """Returns the data to train on, and what to validate on.

        Args:
            data: what `fit` was called with.
            by_chief: see `Inputs.dataset_function`.

        Raises:
            UsageError: the data cannot be split.
            TrainingError: it is not data that Keras takes.
        """
        given = self.validation_data
        if isinstance(given, Validation):
            own = _inputs(given.data)
            return data, replace(
                given, data=own.dataset_function(self._size_for(own), shuffle=False, by_chief=by_chief)
            )
        if given is not None:
            return data, self._validation(_inputs(given), by_chief)
        if self.validation_split:
            data, held_out = data.split(self.validation_split)
            return data, self._validation(held_out, by_chief)
        return data, None

    def _validation(self, data: Inputs, by_chief: bool) -> Validation:
        steps = self.validation_steps
        function = data.dataset_function(self._size_for(data), batches=steps, shuffle=False, by_chief=by_chief)
        return Validation(function, steps, at_epochs=self._epochs())

    def _size_for(self, data: Inputs) -> int | None:
        return self.validation_batch_size or self.batch_size if data.arrays else None

    def _epochs(self) -> Container[int]:
        return _Every(self.validation_freq) if isinstance(self.validation_freq, int) else self.validation_freq


@dataclass(frozen=True)
class _Every:
    """The multiples of a number."""

    number: int

    def __contains__(self, epoch: object) -> bool:
        return isinstance(epoch, int) and epoch % self.number == 0


def _inputs(data: Any) -> Inputs:
    return Inputs.of(tuple(data) if isinstance(data, list) else data, name="validation_data")
