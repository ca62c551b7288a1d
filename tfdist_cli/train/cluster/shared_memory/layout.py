"""The arrays that workers and ps write for each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES
from tfdist_cli.train.tf_compat.control_flow import unordered
from tfdist_cli.train.tf_compat.data import call_registered


@dataclass(frozen=True)
class Layout:
    """The arrays of the boards of a run, which all its tasks know.

    Args:
        values: those of each ps that workers read, the leader first.
        others: more arrays of each ps: the gradients that a worker writes for it, or slots.
        report: what a worker writes for the leader besides.
    """

    values: Sequence[Sequence[Array]]
    others: Sequence[Sequence[Array]]
    report: Array = field(default_factory=lambda: Array(np.dtype(np.float64), 0))

    @property
    def of_worker(self) -> list[Array]:
        """The arrays of a worker's board."""
        return [self.report, *(array for own in self.others for array in own)]

    def part(self, ps: int) -> slice:
        """Which arrays of a worker's board are for a ps."""
        begin = 1 + sum(map(len, self.others[:ps]))
        return slice(begin, begin + len(self.others[ps]))

    @property
    def packed(self) -> np.ndarray:
        """Its numbers, int64: of the ps, of the report, then of each ps those of its values and others."""
        numbers = [len(self.values), self.report.size]
        for arrays in (own for each in zip(self.values, self.others, strict=True) for own in each):
            numbers.append(len(arrays))
            numbers += [number for each in arrays for number in (tf.as_dtype(each.dtype).as_datatype_enum, each.size)]
        return np.array(numbers, np.int64)

    @classmethod
    def unpacked(cls, numbers: np.ndarray) -> Layout:
        """Returns the layout that `packed` gives these numbers of."""
        count_of_ps, report, *rest = numbers.tolist()
        left = iter(rest)

        def arrays() -> Iterator[Array]:
            for _ in range(next(left)):
                kind = next(left)
                yield Array(np.dtype(tf.as_dtype(kind).as_numpy_dtype), next(left))

        each = [(tuple(arrays()), tuple(arrays())) for _ in range(count_of_ps)]
        values, others = zip(*each, strict=True)
        return cls(values, others, Array(np.dtype(np.float64), report))

    def opened_on(self, devices: Sequence[str], function: str, *arguments: tf.Tensor) -> tf.Tensor:
        """Opens the boards of all ps; called in a function.

        Args:
            devices: the ps, the leader first.
            function: the registered function that opens a ps's: the number of the ps, the arguments, `packed` → its
                identity.
            arguments: the others.

        Returns:
            The identities, uint8, shape (ps, bytes).
        """
        identities = []
        for number, device in enumerate(devices):
            with tf.device(device):
                (own,) = call_registered(function, [tf.constant(number), *arguments, self.packed], [tf.uint8])
                identities.append(tf.ensure_shape(unordered(own), [IDENTITY_BYTES]))
        return tf.stack(identities)
