"""A ps's side of steps that workers take together, see `memory`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from tfdist_cli.train.cluster.shared_memory.lockstep.memory import (
    ABORTED,
    ALLOWED,
    BEGUN,
    COMMITTED,
    COUNT,
    END,
    FIRST,
    LATER,
    NEVER,
    REPORTED,
    SAVED,
    UPDATED,
    UPDATING,
    WANTED,
    Content,
    StepLayout,
)
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, NONCE_BYTES, Region
from tfdist_cli.train.cluster.shared_memory.stored import StoredValues


class Aborted(Exception):
    """There will be no more steps, as the run was aborted."""


class PsSteps:
    """A ps's memory.

    Args:
        ps: its number; 0 is the leader, whose words tell how far the workers are.
        layout: of all ps.

    Raises:
        AttributeError, OSError: this system cannot share memory, or has none left.

    Attributes:
        identity: what workers need to open it, `IDENTITY_BYTES` bytes.
    """

    def __init__(self, ps: int, layout: StepLayout) -> None:
        region, self.identity = Region.identifying(ALIGNED - NONCE_BYTES + Content.bytes(layout, ps))
        self._descriptor = region.descriptor
        self._content = Content(region.memory[ALIGNED:], layout, ps)
        self._stored = StoredValues(self._content.variables)
        self._kept = layout.kept
        self._closing = threading.Lock()
        self._is_closed = False

    def begin(self, first: int, count: int, allowed: int, variables: Sequence[np.ndarray]) -> None:
        """Begins a run.

        Args:
            first: the sequence number of its first step.
            count: how many updates there were.
            allowed: the sequence number before which steps may be taken now.
            variables: the values of the parameters, of their slots, and of the state.

        Raises:
            Aborted: it was aborted.
        """
        self.check()
        self._stored.write(variables)
        for worker in self._content.workers:
            for word in (COMMITTED, UPDATING, UPDATED, REPORTED):
                worker.store(word, first - 1)
            worker.store(SAVED, NEVER)
        numbers = self._content.numbers
        numbers.store(COUNT, count)
        numbers.store(END, allowed if allowed == first else LATER)
        numbers.store(WANTED, first)
        numbers.store(ALLOWED, min(allowed, first + self._kept))
        numbers.store(FIRST, first)
        numbers.store(BEGUN, numbers[BEGUN] + 1)

    def read(self, variables: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns copies of what is in the memory now, for the variables, when all steps are taken.

        Args:
            variables: see `begin`; those that were assigned meanwhile stay.
        """
        return self._stored.read(variables)

    def abort(self) -> None:
        """Ends the run: workers take no more steps. Any thread may call it."""
        self._content.numbers.store(ABORTED, 1)
        for word in (BEGUN, ALLOWED):
            self._content.numbers.wake(word)
        for worker in self._content.workers:
            for word in (COMMITTED, UPDATED, REPORTED):
                worker.wake(word)
        self._close()

    def _close(self) -> None:
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)

    def check(self) -> None:
        """Looks whether the run goes on.

        Raises:
            Aborted: it was aborted.
        """
        if self._content.numbers[ABORTED]:
            raise Aborted
