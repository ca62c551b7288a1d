"""Memory of a ps in which workers take steps together: parameters, slots, the model's state, and gradients.

In a step, whose *sequence number* grows from step to step, each worker

1. computes gradients with the parameters where they are, writes them to the memory of the ps, and *commits* them;
2. waits until all workers have, sums a part of the gradients of all of them, and updates this part of the parameters
   and of their slots;
3. waits until all parts are updated, and the next step is allowed.

The gradient of a matrix that a batch is multiplied by is the product of two *factors*: the batch, and the gradient of
the result. Where they have fewer values than the gradient, workers write them in its place. Each computes some rows of
the product, for the examples of all workers at once. Then nobody writes a gradient, or sums some. See `factors`.

A part is some rows of each of these matrices, and a slice of all other parameters of a ps, which begins and ends
anywhere within them. So only optimizers whose update of a value depends on nothing but the gradient and the slots of
the same value can be used. A worker notes in *words* how far it is, see `words`. The ps does nothing in a step. The
chief allows some steps ahead, and reads the reports of those that are done.

Nothing is lost with a worker that is killed: what it has written belongs to the ps. That keeps the sums and the factors
of the last steps, and a copy of the worker's part from before them. The next process finds in the words how far the
worker was. If it had committed, it does not commit again. If it was updating its part, the copy takes the place of the
part, and the updates of these steps are made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.lockstep.factors import FactorPlaces, Factors
from tfdist_cli.train.cluster.shared_memory.lockstep.words import Words
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, aligned

BEGUN, FIRST, COUNT, ALLOWED, END, WANTED, ABORTED = range(7)
"""Words of a ps: how many runs have begun, the first sequence number of the last one, how many updates were before it,
the number before which steps are allowed, the number at which the run ends, the number of a step whose reports are
awaited, and whether the run was aborted."""
COMMITTED, SAVED, UPDATING, UPDATED, REPORTED = range(5)
"""Words of a worker, each a sequence number: the last one whose gradients it has committed, the one before whose update
it has saved its part, the last one that it has begun to update, and has updated, and the last one of which it has told
the chief."""
LATER = 1 << 62
"""A sequence number after all others."""
NEVER = -LATER
"""One before all others."""
_REPORTS_BYTES = 1 << 20
_MOST_REPORTS = 64
_MEANS_BYTES = 1 << 24
_MOST_MEANS = 8
"""With 4, the MLP 784-500-500-10 at batch 64 takes 1.07 times as many steps as if each part were saved in each step."""
_NUMBERS_OF_FACTORS = 2 + len(fields(Factors))


@dataclass(frozen=True)
class StepLayout:
    """What the memory of all ps has.

    Args:
        arrays: the parameters of each ps, its part of the model's state, and a worker's report of a step.
        slots: how many slots a parameter has, each like the parameter.
        workers: how many workers there are.
        state: where the new values of the model's state begin in a report: of those variables that steps assign.
        assigned: for each of them the ps, and its place among the state there.
        factors: of some parameters, by the numbers of the ps and of the parameter there.
    """

    arrays: Layout
    slots: int
    workers: int
    state: int
    assigned: Sequence[tuple[int, int]]
    factors: Mapping[tuple[int, int], Factors] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        """Of how many steps the reports are kept."""
        return min(_MOST_REPORTS, max(2, _REPORTS_BYTES // max(1, self.arrays.report.bytes)))

    @property
    def kept_means(self) -> int:
        """Of how many updates the means of gradients, and the factors, are kept: a part is saved once in so many."""
        size = sum(self.offsets(ps)[-1] for ps in range(len(self.arrays.values)))
        size += sum(each.bytes for each in self.factors.values())
        return min(_MOST_MEANS, max(1, _MEANS_BYTES // max(1, size)))

    def summed(self, ps: int) -> list[int]:
        """The numbers of the parameters of a ps whose gradients are summed: those without factors."""
        return [number for number in range(len(self.arrays.values[ps])) if (ps, number) not in self.factors]

    def factors_on(self, ps: int) -> dict[int, Factors]:
        """The factors by the numbers of the parameters of a ps."""
        return {number: each for (own, number), each in self.factors.items() if own == ps}

    def offsets(self, ps: int) -> list[int]:
        """Where each parameter without factors begins among those of a ps, in bytes, and where the last one ends."""
        sizes = [aligned(self.arrays.values[ps][number].bytes) for number in self.summed(ps)]
        return [int(end) for end in np.cumsum([0, *sizes])]

    def part(self, ps: int, worker: int) -> slice:
        """Which values of the parameters without factors are the part of a worker: whole lines of the memory."""
        lines, size = self.offsets(ps)[-1] // ALIGNED, ALIGNED // self.dtype.itemsize
        begin, end = (lines * each // self.workers * size for each in (worker, worker + 1))
        return slice(begin, end)

    @property
    def dtype(self) -> np.dtype:
        """The type of all parameters."""
        return next(array.dtype for own in self.arrays.values for array in own)

    @property
    def packed(self) -> np.ndarray:
        """Its numbers, int64."""
        places = [number for place in self.assigned for number in place]
        factors = [number for place, each in self.factors.items() for number in (*place, *each.packed)]
        head = [self.slots, self.workers, self.state, len(self.assigned), len(self.factors), *places, *factors]
        return np.concatenate([np.array(head, np.int64), self.arrays.packed])

    @classmethod
    def unpacked(cls, numbers: np.ndarray) -> StepLayout:
        """Returns the layout that `packed` gives these numbers of."""
        slots, workers, state, count, with_factors = numbers[:5].tolist()
        places, packed, arrays = np.split(numbers[5:], np.cumsum([2 * count, _NUMBERS_OF_FACTORS * with_factors]))
        assigned = [(int(ps), int(place)) for ps, place in places.reshape([-1, 2])]
        rows = packed.reshape([-1, _NUMBERS_OF_FACTORS]).tolist()
        factors = {(ps, number): Factors(*each) for ps, number, *each in rows}
        return cls(Layout.unpacked(arrays), slots, workers, state, assigned, factors)


class Content:
    """What is in the memory of a ps.

    Args:
        memory: the bytes.
        layout: of all ps.
        ps: the number of this one.

    Attributes:
        numbers: the words of the ps.
        workers: those of each worker.
        reports: of each worker and step, shape (workers, `StepLayout.kept`, numbers).
        flat: the parameters without factors one after another; their slots, likewise; each with some values behind it.
        matrices: of each parameter with factors its values, and those of each slot, likewise.
        parameters: each parameter.
        slots: for each parameter its slots.
        state: the model's.
        gradients: of each worker those of `flat`, all one after another.
        gradient_of: of each worker, those of each parameter.
        saved: of each of `flat` a copy from before some updates.
        saved_matrices: likewise, of each of `matrices`.
        means: those of the gradients of these updates, shape (`StepLayout.kept_means`, values).
        factors: of these updates, for each matrix.
    """

    def __init__(self, memory: np.ndarray, layout: StepLayout, ps: int) -> None:
        take = _taker(memory)
        self.numbers = Words(take(ALIGNED).view(np.int64))
        self.workers = [Words(take(ALIGNED).view(np.int64)) for _ in range(layout.workers)]
        report = layout.arrays.report
        reports = take(layout.workers * layout.kept * report.bytes).view(report.dtype)
        self.reports = reports.reshape([layout.workers, layout.kept, report.size])
        offsets, dtype, factors = layout.offsets(ps), layout.dtype, layout.factors_on(ps)
        size, copies, updates = offsets[-1], range(1 + layout.slots), range(layout.kept_means)
        summed = [layout.arrays.values[ps][number] for number in layout.summed(ps)]
        sizes = [layout.arrays.values[ps][number].bytes for number in factors]
        self.flat = [take(size + ALIGNED).view(dtype) for _ in copies]
        self.matrices = [[take(each + ALIGNED).view(dtype) for _ in copies] for each in sizes]
        of_flat = zip(*(_each(own, offsets, summed) for own in self.flat), strict=True)
        of_matrices = [[own[: -ALIGNED // dtype.itemsize] for own in each] for each in self.matrices]
        found = dict(zip((*layout.summed(ps), *factors), (*of_flat, *of_matrices), strict=True))
        self.parameters = [found[number][0] for number in sorted(found)]
        self.slots = [found[number][1:] for number in sorted(found)]
        self.state = [take(array.bytes).view(array.dtype) for array in layout.arrays.others[ps]]
        self.gradients = [take(size).view(dtype) for _ in range(layout.workers)]
        self.gradient_of = [_each(own, offsets, summed) for own in self.gradients]
        self.saved = [take(size).view(dtype) for _ in copies]
        self.saved_matrices = [[take(each).view(dtype) for _ in copies] for each in sizes]
        self.means = [take(size).view(dtype) for _ in updates]
        self.factors = [[FactorPlaces(each, take, dtype) for each in factors.values()] for _ in updates]

    @property
    def variables(self) -> list[np.ndarray]:
        """The parameters, their slots, and the state."""
        return [*self.parameters, *(slot for own in self.slots for slot in own), *self.state]

    @staticmethod
    def bytes(layout: StepLayout, ps: int) -> int:
        """How many bytes it has."""
        size, report, copies, updates = (
            layout.offsets(ps)[-1],
            layout.arrays.report,
            1 + layout.slots,
            layout.kept_means,
        )
        flat = copies * (2 * size + ALIGNED) + (layout.workers + updates) * size
        reports = aligned(layout.workers * layout.kept * report.bytes)
        state = sum(aligned(array.bytes) for array in layout.arrays.others[ps])
        factors = layout.factors_on(ps)
        matrices = copies * sum(2 * layout.arrays.values[ps][number].bytes + ALIGNED for number in factors)
        kept = updates * sum(each.bytes for each in factors.values())
        return (1 + layout.workers) * ALIGNED + reports + flat + state + matrices + kept


def _taker(memory: np.ndarray) -> Callable[[int], np.ndarray]:
    """Returns a function that returns the next bytes of some memory."""
    taken = 0

    def take(size: int) -> np.ndarray:
        nonlocal taken
        begin, taken = taken, taken + aligned(size)
        return memory[begin : begin + size]

    return take


def _each(flat: np.ndarray, offsets: Sequence[int], arrays: Sequence[Array]) -> list[np.ndarray]:
    """The arrays that follow each other in a flat one."""

    def found() -> Iterator[np.ndarray]:
        for offset, array in zip(offsets, arrays, strict=False):
            begin = offset // flat.itemsize
            yield flat[begin : begin + array.size]

    return list(found())
