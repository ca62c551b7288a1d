"""Decides how many steps one function unrolls: few in a training's first steps, all of them once that pays.

A function of k steps takes k times as long to trace and to optimize as one of a single step, and saves the constant
cost of k - 1 executions. So a large model starts with few steps in a function. The function of all steps is built after
as many steps as it takes to save its own cost: at worst, that doubles what is lost. The decision depends on nothing
that is measured, so tasks that step together make the same one, and so does another run.
"""

from __future__ import annotations

FIRST_OPERATIONS = 2000
"""The most operations in the first function: TensorFlow takes about 1.2 s of a core to build it."""
_STEPS_TO_SAVE = 2
"""Steps in which an execution of several steps saves the cost of building one more operation: an operation costs 0.6 ms
of a core, and each execution 0.35 ms."""


def unrolled_steps(wanted: int, operations: int, done: int) -> int:
    """Returns the steps in the next function: `wanted`, or a divisor of it.

    Args:
        wanted: the steps in an execution in the long run.
        operations: the operations of a step.
        done: the steps that this launch has taken so far.
    """
    if done >= _STEPS_TO_SAVE * operations * wanted:
        return wanted
    most = max(1, min(wanted, FIRST_OPERATIONS // operations))
    return max(size for size in range(1, most + 1) if wanted % size == 0)
