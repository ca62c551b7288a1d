"""Replaces attributes of objects temporarily, also if several replicas do so in alternation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_ABSENT = object()


@dataclass(eq=False)
class _Replacement:
    """A value that an attribute has within a context."""

    value: Any


@dataclass
class _Original:
    """An attribute before it was replaced.

    Args:
        value: its value; `_ABSENT` if the object did not have it itself.
        replacements: those of the contexts that replace it now, the latest last.
    """

    value: Any
    replacements: list[_Replacement] = field(default_factory=list)


_originals: dict[tuple[int, str], _Original] = {}


@contextlib.contextmanager
def replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Within the context, attributes of an object have other values.

    Such contexts may be nested. The replicas of one task are traced in threads that alternate, also within such a
    context. The first replica that enters it stores the original value, and the last one that leaves restores it; in
    between, the latest value holds.

    Args:
        owner: the object. Its `__dict__` is changed, so that neither Keras nor TensorFlow tracks the values.
        attributes: the values by name.
    """
    own = vars(owner)
    replacements = {name: _Replacement(value) for name, value in attributes.items()}
    for name, replacement in replacements.items():
        original = _originals.setdefault((id(owner), name), _Original(own.get(name, _ABSENT)))
        original.replacements.append(replacement)
        own[name] = replacement.value
    try:
        yield
    finally:
        for name, replacement in replacements.items():
            original = _originals[id(owner), name]
            original.replacements.remove(replacement)
            if original.replacements:
                own[name] = original.replacements[-1].value
                continue
            del _originals[id(owner), name]
            if original.value is _ABSENT:
                del own[name]
            else:
                own[name] = original.value


def original(owner: Any, name: str) -> Any:
    """Returns the value that an attribute has outside of all such contexts."""
    kept = _originals.get((id(owner), name))
    return getattr(owner, name) if kept is None or kept.value is _ABSENT else kept.value
