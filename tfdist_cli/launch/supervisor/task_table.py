"""The states of a job's tasks: an immutable mapping that answers questions about all tasks without looking at each.

The tasks are in blocks. A change of one task replaces its block, and what is known of the other blocks is kept. So an
event costs the size of a block and the number of blocks, in place of the number of tasks: at 1,000 tasks and a
heartbeat of each every 2 s this decides whether one process can supervise them.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from itertools import chain
from typing import Any, Generic, TypeVar

from tfdist_cli.spec.task_id import TaskId

State = TypeVar("State")
_BLOCK = 32
"""Tasks in a block: about the square root of the largest number of tasks."""


class TaskTable(Mapping[TaskId, State], Generic[State]):
    """The state of each task, in the order of the plan.

    Args:
        blocks: the states, in blocks.
        block_of: the number of each task's block, in the order of the plan.
    """

    def __init__(self, blocks: list[_Block[State]], block_of: Mapping[TaskId, int]) -> None:
        self.blocks = blocks
        self._block_of = block_of

    @classmethod
    def of(cls, states: Mapping[TaskId, State]) -> TaskTable[State]:
        """The table of some states, in their order."""
        names = list(states)
        chunks = (names[start : start + _BLOCK] for start in range(0, len(names), _BLOCK))
        blocks = [_Block({name: states[name] for name in chunk}) for chunk in chunks]
        return cls(blocks, {name: number // _BLOCK for number, name in enumerate(names)})

    def __getitem__(self, name: TaskId) -> State:
        return self.blocks[self._block_of[name]].states[name]

    def __iter__(self) -> Iterator[TaskId]:
        return iter(self._block_of)

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, name: object) -> bool:
        return name in self._block_of

    def items(self) -> ItemsView[TaskId, State]:
        """The tasks and their states, faster than by looking up each."""
        return _Items(self)

    def with_states(self, states: Mapping[TaskId, State]) -> TaskTable[State]:
        """The table with other states of some tasks, or with more tasks."""
        if not states.keys() <= self._block_of.keys():
            return TaskTable.of({**self, **states})
        changed: dict[int, dict[TaskId, State]] = {}
        for name, state in states.items():
            changed.setdefault(self._block_of[name], {})[name] = state
        blocks = self.blocks.copy()
        for number, each in changed.items():
            blocks[number] = _Block({**blocks[number].states, **each})
        return TaskTable(blocks, self._block_of)

    def select(self, applies: Callable[[TaskId, State], object]) -> tuple[TaskId, ...]:
        """The tasks to which a condition applies.

        Args:
            applies: a function of a module, which depends on its arguments only: results are kept for each block.
        """
        return tuple(chain.from_iterable([block.selected(applies) for block in self.blocks]))

    def earliest(self, time: Callable[[TaskId, State], float | None]) -> float | None:
        """The earliest of the tasks' times; None if there is none.

        Args:
            time: a function as in `select`.
        """
        times = [block.earliest(time) for block in self.blocks]
        return min((each for each in times if each is not None), default=None)


class _Items(ItemsView[TaskId, State]):
    _mapping: TaskTable[State]

    def __iter__(self) -> Iterator[tuple[TaskId, State]]:
        return chain.from_iterable(block.states.items() for block in self._mapping.blocks)


class _Block(Generic[State]):
    """Some of the tasks, and what was asked about them."""

    __slots__ = ("_answers", "states")

    def __init__(self, states: Mapping[TaskId, State]) -> None:
        self.states = states
        self._answers: dict[Callable[[TaskId, State], Any], Any] = {}

    def selected(self, applies: Callable[[TaskId, State], object]) -> tuple[TaskId, ...]:
        if applies not in self._answers:
            self._answers[applies] = tuple(name for name, state in self.states.items() if applies(name, state))
        found: tuple[TaskId, ...] = self._answers[applies]
        return found

    def earliest(self, time: Callable[[TaskId, State], float | None]) -> float | None:
        if time not in self._answers:
            times = [time(name, state) for name, state in self.states.items()]
            self._answers[time] = min((each for each in times if each is not None), default=None)
        found: float | None = self._answers[time]
        return found
