"""Which checkpoints are kept: the newest ones, those that an evaluator has not evaluated, and one of other files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tfdist_cli.protocol.run_files import parse_object, whole
from tfdist_cli.train.checkpoint.files.state import DamagedCheckpoint, StoredCheckpoint

EVALUATED_FILE = "evaluator.json"
UNEVALUATED_KEPT = 16
"""How many checkpoints to keep beyond `keep` until an evaluator has evaluated them."""


def undamaged(peek: Callable[[int], StoredCheckpoint], steps: Sequence[int]) -> dict[int, int]:
    """Returns the steps of the undamaged ones of some checkpoints, each with its `TrainingState.shared_step`.

    Args:
        peek: returns the checkpoint of a step.
        steps: the steps, oldest first.
    """
    found = {}
    for step in steps:
        with contextlib.suppress(DamagedCheckpoint):
            found[step] = peek(step).state.shared_step
    return found


def steps_to_remove(shared: Mapping[int, int], keep: int, evaluated: Collection[int] | None) -> list[int]:
    """Returns the steps of the checkpoints that are no longer kept.

    If the newest ones are deltas of the same full one, damage to its files would damage all of them. Then the newest of
    the others is kept, too.

    Args:
        shared: the steps of all undamaged checkpoints, oldest first, each with its `TrainingState.shared_step`.
        keep: how many to keep.
        evaluated: the steps of those that an evaluator has evaluated; None if there is no evaluator.
    """
    steps = list(shared)
    unevaluated = set(steps[-(keep + UNEVALUATED_KEPT) :]) - set(evaluated) if evaluated is not None else set()
    full = {shared[step] for step in steps[-keep:]}
    are_deltas = len(full) == 1 and full != {steps[-1]}
    spare = [step for step in steps[:-keep] if are_deltas and shared[step] not in full][-1:]
    return [step for step in steps[:-keep] if step not in unevaluated and step not in spare]


def pack_evaluated(steps: Sequence[int], scores: Mapping[str, Any] | None = None) -> bytes:
    """Returns the content of evaluator.json."""
    return json.dumps({"scored": list(steps), **(scores or {})}).encode()


def parse_evaluated(content: bytes) -> list[int] | None:
    """Returns the steps in an evaluator.json; None if it is damaged."""
    try:
        steps = parse_object(content)["scored"]
    except (ValueError, KeyError):
        return None
    return [found for step in steps if (found := whole(step)) is not None] if isinstance(steps, list) else None
