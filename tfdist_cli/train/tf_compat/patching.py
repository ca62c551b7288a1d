"""Replacing attributes of Keras's and TensorFlow's objects for a while, also where several replicas do so by turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass
class _Original:
    """What an attribute was before anybody replaced it.

    Args:
        value: its value; `_ABSENT` if the object had none of its own.
        users: how many contexts replace it now.
    """

    value: Any
    users: int = 0


_originals: dict[tuple[int, str], _Original] = {}


@contextlib.contextmanager
def replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Within it, an object has other attributes.

    The replicas of one task are traced in threads that take turns, also within such a context. The first replica that
    enters it keeps the original, and the last one that leaves brings it back; in between, the latest value holds.

    Args:
        owner: the object; its own dictionary is changed, so that neither Keras nor TensorFlow tracks what is set.
        attributes: the values by name.
    """
    own = vars(owner)
    for name, value in attributes.items():
        original = _originals.setdefault((id(owner), name), _Original(own.get(name, _ABSENT)))
        original.users += 1
        own[name] = value
    try:
        yield
    finally:
        for name in attributes:
            original = _originals[id(owner), name]
            original.users -= 1
            if original.users:
                continue
            del _originals[id(owner), name]
            if original.value is _ABSENT:
                del own[name]
            else:
                own[name] = original.value


def original(owner: Any, name: str) -> Any:
    """What an attribute is where nobody replaces it."""
    kept = _originals.get((id(owner), name))
    return getattr(owner, name) if kept is None or kept.value is _ABSENT else kept.value
