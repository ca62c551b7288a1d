"""`--set path=value` sets one key of a file on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tfdist_cli.spec.loading.positions import DEEPEST, Node, read_yaml
from tfdist_cli.spec.loading.problems import CONFIDENTIAL, Place, Problem, SpecError, dotted


@dataclass(frozen=True)
class Override:
    """One `--set`.

    Args:
        path: the keys, and the indices of lists, that lead to the value.
        value: the new value.
    """

    path: tuple[str, ...]
    value: Node

    @property
    def place(self) -> Place:
        """The place that messages name."""
        return self.value.place

    @classmethod
    def parse(cls, text: str, environ: Mapping[str, str]) -> Override:
        """Parses `roles.worker.replicas=4`. The value is YAML.

        Raises:
            SpecError: there is no `=` or nothing after it, a part of the path is empty, or the value is not YAML.
        """
        path, equals, value = text.partition("=")
        hidden = equals and set(CONFIDENTIAL) & set(path.split("."))
        source = f"--set {path}=..." if hidden else f"--set {text}"
        if not equals:
            _refuse(Place(source), "expected PATH=VALUE, such as roles.worker.replicas=4", code="malformed-override")
        parts = tuple(path.strip().split("."))
        if not all(parts):
            message = "a part of the path is empty: expected PATH=VALUE, such as roles.worker.replicas=4"
            _refuse(Place(source), message, code="malformed-override")
        if not value.strip():  # an empty variable of a shell must not mean the default
            message = "there is no value: write null for the default, or '' for an empty text"
            _refuse(Place(source), message, code="malformed-override")
        if len(parts) > DEEPEST:
            _refuse(Place(source), f"the path is more than {DEEPEST} deep", code="nested-too-deep")
        return cls(parts, read_yaml(value, source, environ, marks=False, depth=len(parts)))

    def apply(self, root: Node) -> None:
        """Puts the value into the tree. Creates the maps on the path that are missing.

        A whole number that replaces a decimal number becomes a decimal number: Keras needs a learning rate of `1.0`.

        Raises:
            SpecError: the path leads through a value that is neither a map nor a list, or past the end of a list.
        """
        node = root
        for depth, part in enumerate(self.path[:-1]):
            child = node.child(_index(node, part, self, depth))
            if child is None or child.content is None:
                child = Node({}, self.place, self.place)
                self._put(node, part, depth, child)
            node = child
        self._put(node, self.path[-1], len(self.path) - 1, Node(self.value.content, self.place, self.place))

    def _put(self, node: Node, part: str, depth: int, value: Node) -> None:
        content: Any = node.content
        index = _index(node, part, self, depth)
        before = node.child(index)
        if before and type(before.content) is float and type(value.content) is int:
            value.content = float(value.content)
        content[index] = value


def _index(node: Node, part: str, override: Override, depth: int) -> str | int:
    """Returns `part` as a key of the map `node`, or as an index of the list `node`."""
    above = dotted(override.path[:depth])
    if isinstance(node.content, dict):
        return part
    if not isinstance(node.content, list):
        message = f"{above} is not a map or a list, so that it has no {part!r}; it is set at {node.place}"
        _refuse(override.place, message, code="not-a-container")
    size = len(node.content)
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < size):
        numbers = f"with items 0 to {size - 1}" if size else "and is empty"
        _refuse(override.place, f"{above} is a list {numbers}, so that it has no {part!r}", code="no-such-item")
    return int(part)


def _refuse(place: Place, message: str, *, code: str) -> NoReturn:
    raise SpecError([Problem(place, "", message, code)])
