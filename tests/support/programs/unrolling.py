"""When asynchronous workers of this process begin to take unrolled steps, which depends on time otherwise."""

from collections import Counter

from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.asynchronous.unrolled import UnrolledFunctions

LOOPS = 5
is_ready = UnrolledFunctions.is_ready
asked = Counter[UnrolledFunctions]()


def at_once():
    """From the first step on: the training waits for the function."""
    Pacing.unrolls = lambda *_: True  # type: ignore[method-assign]
    UnrolledFunctions.is_ready = lambda *_, **__: True  # type: ignore[method-assign]


def after_loops():
    """After some loops, in the middle of an epoch."""
    UnrolledFunctions.is_ready = _ready_after_loops  # type: ignore[method-assign]


def _ready_after_loops(functions, count, iterators):
    asked[functions] += 1
    ready = is_ready(functions, count, iterators)
    if asked[functions] <= LOOPS or ready:
        return ready and asked[functions] > LOOPS
    with functions.training_waits():
        functions._thread.join()
    assert is_ready(functions, count, iterators)
    return True
