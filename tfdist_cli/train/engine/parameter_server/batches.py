"""The batches of a worker's function, and the rows of tables that they look up.

To look up ids takes about twenty operations, whose overhead exceeds their work, and their numbers cross to the ps in a
request of their own. So both are done for several rounds of batches at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.model.embeddings import Lookup

_ROUNDS_LOOKED_UP_TOGETHER = 5
"""The first of them waits until the batches of all have been read."""


@dataclass(frozen=True)
class ReadBatches:
    """The batches of a round, which are trained with the same parameters.

    Args:
        batches: the batches.
        lookup: the rows of tables that they look up.
        sent: the same, as far as it is on the ps already.
        is_sent: whether the numbers of the rows were sent with those of other rounds.
    """

    batches: list[Any]
    lookup: Lookup
    sent: Lookup
    is_sent: bool


class BatchReader:
    """Reads the batches of some rounds in order.

    Args:
        context: the model on its cluster.
        rounds: how many batches each round has.
        ahead: whether the batches of several rounds may be read at once.
    """

    def __init__(self, context: ParameterServerContext, rounds: Sequence[int], *, ahead: bool = True) -> None:
        self._tables, self._transport = context.tables, context.transport
        self._left = list(rounds)
        self._together = _ROUNDS_LOOKED_UP_TOGETHER if ahead and context.tables.are_numbered else 1
        self._read: list[ReadBatches] = []

    def next_round(self, read: Callable[[], Any], before: Sequence[tf.Tensor] = ()) -> ReadBatches:
        """Returns the batches of the next round.

        Args:
            read: reads a batch.
            before: awaited before the batches are read, unless they were read with those of a round before.
        """
        if not self._read:
            with tf.control_dependencies(before):  # otherwise all batches of a function would be read at once
                batches = [[read() for _ in range(count)] for count in self._left[: self._together]]
            del self._left[: self._together]
            lookups, is_sent = self._tables.lookups(batches), len(batches) > 1
            sent = self._transport.sent_ahead(lookups) if is_sent else lookups
            self._read = [ReadBatches(*each, is_sent) for each in zip(batches, lookups, sent, strict=True)]
        return self._read.pop(0)
