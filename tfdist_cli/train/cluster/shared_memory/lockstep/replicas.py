"""Steps that replicas take together, without ps and chief, see `memory`: one of them owns the memory.

Each replica has variables of its own, which have copies of the values before and after a run. Those of all replicas are
equal then. A replica that is lost ends the training, so nothing is kept for one that is started again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist_cli.train.cluster.shared_memory.lockstep.memory import (
    ALLOWED,
    COUNT,
    END,
    FIRST,
    LATER,
    SAVED,
    UPDATED,
    StepLayout,
)
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import MAY_BEGIN, Watch, WorkerSteps
from tfdist_cli.train.cluster.shared_memory.stored import StoredValues


class ReplicaSteps(WorkerSteps):
    """What a replica has of the memory.

    Args:
        replica: its number.
        layout: of the memory; reports have no numbers.
        identity: of the memory, `PsSteps.identity`.
        have_ended: see `WorkerSteps`; it may raise an error.
    """

    def __init__(self, replica: int, layout: StepLayout, identity: bytes, have_ended: Watch) -> None:
        super().__init__(replica, layout, [identity], have_ended)
        self._stored = StoredValues(self._ps[0].variables)

    def enter(self, count: int, variables: Sequence[np.ndarray]) -> None:
        """Begins a run. All replicas do so, with the same values: none takes a step before all have.

        Args:
            count: how many updates there were.
            variables: the values of the parameters and of their slots. They are written where they were assigned since
                the last run.
        """
        self._stored.write(variables)
        numbers = self._ps[0].numbers
        numbers.store(COUNT, count + numbers[FIRST] - self.following)
        for word in (END, ALLOWED):
            numbers.store(word, LATER)
        self._own.store(SAVED, LATER)

    @property
    def following(self) -> int:
        """The sequence number of the next step."""
        return self._own[UPDATED] + 1

    @property
    def token(self) -> tuple[int, int]:
        """The sequence number of the next step, and that it may begin."""
        return self.following, MAY_BEGIN

    def read(self, variables: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Returns copies of what is in the memory, for the variables, when all steps are taken.

        Args:
            variables: see `enter`; those that were assigned meanwhile stay.
        """
        return self._stored.read(variables)
