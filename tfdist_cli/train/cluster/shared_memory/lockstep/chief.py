"""The chief's side of steps that workers take together, see `memory`: it allows steps, and reads their reports."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist_cli.train.cluster.shared_memory.lockstep.memory import (
    ABORTED,
    ALLOWED,
    END,
    REPORTED,
    UPDATED,
    WANTED,
    Content,
    StepLayout,
)
from tfdist_cli.train.cluster.shared_memory.lockstep.words import fence
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, OthersMemory, has_ended

_CHECK_SECONDS = 1.0
"""How often the chief looks whether the ps are still there: nobody wakes it but for the steps that it waits for."""


class NoMoreSteps(Exception):
    """There will be no more steps: the run was aborted, or a ps has ended."""


class ChiefSteps:
    """The memory of the leader, as the chief uses it. No message is sent for steps and their reports.

    Args:
        layout: of all ps.
        identities: of all ps, `PsSteps.identity`, the leader first.

    Raises:
        OSError: the memory of a ps cannot be opened here, see `OthersMemory.of`.
    """

    def __init__(self, layout: StepLayout, identities: Sequence[bytes]) -> None:
        memories = [OthersMemory.of(identity) for identity in identities]
        self._processes = [memory.process for memory in memories]
        self._content = Content(memories[0].first(ALIGNED + Content.bytes(layout, 0))[ALIGNED:], layout, 0)
        self._kept = layout.kept

    def collect(self, first: int, count: int, allowed: int, *, ends: bool) -> np.ndarray:
        """Waits until all workers have taken some steps.

        Args:
            first: the sequence number of the first step.
            count: how many.
            allowed: the sequence number before which steps may be taken now.
            ends: whether the run ends there.

        Returns:
            The reports, shape (steps, workers, numbers).

        Raises:
            NoMoreSteps: the steps will not be taken.
        """
        if ends:
            self._content.numbers.store(END, allowed)
        found = []
        for begin in range(first, first + count, half := max(1, self._kept // 2)):
            end = min(begin + half, first + count)
            limit = min(allowed, begin + self._kept)
            # Workers that wait for the next step look again whether there is one, if the number is larger.
            self._content.numbers.store(ALLOWED, limit + (ends and limit == allowed))
            self._await_steps(end - 1)
            found.append(self._content.reports[:, np.arange(begin, end) % self._kept])
        return np.concatenate(found, axis=1).swapaxes(0, 1)

    def _await_steps(self, last: int) -> None:
        """Waits until all workers have taken a step."""
        self._content.numbers.store(WANTED, last)
        for worker in self._content.workers:
            while True:
                if self._content.numbers[ABORTED]:
                    raise NoMoreSteps
                told = worker[REPORTED]
                fence()
                if worker[UPDATED] >= last:
                    break
                worker.sleep(REPORTED, told, _CHECK_SECONDS)
                if worker[REPORTED] == told and any(map(has_ended, self._processes)):
                    raise NoMoreSteps
