"""`--set path=value`: one key of a file, set from the command line."""

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
        path: the keys, and indices of lists, on the way to the value.
        value: what to put there.
    """

    path: tuple[str, ...]
    value: Node

    @property
    def place(self) -> Place:
        """How messages name it."""
        return self.value.place

    @classmethod
    def parse(cls, text: str, environ: Mapping[str, str]) -> Override:
        """Reads `roles.worker.replicas=4`; the value is YAML, and null when nothing follows the `=`.

        Raises:
            SpecError: there is no `=`, a part of the path is empty, or the value is not YAML.
        """
        path, equals, value = text.partition("=")
        hidden = equals and set(CONFIDENTIAL) & set(path.split("."))
        source = f"--set {path}=..." if hidden else f"--set {text}"
        if not equals:
            _refuse(Place(source), "expected PATH=VALUE, such as roles.worker.replicas=4")
        parts = tuple(path.strip().split("."))
        if not all(parts):
            _refuse(Place(source), "a part of the path is empty: expected PATH=VALUE, such as roles.worker.replicas=4")
        if len(parts) > DEEPEST:
            _refuse(Place(source), f"the path is more than {DEEPEST} deep")
        return cls(parts, read_yaml(value, source, environ, marks=False, depth=len(parts)))

    def apply(self, root: Node) -> None:
        """Puts the value into the tree, with the maps on the way that are not there.

        A whole number in the place of a decimal one is taken for such: Keras wants a learning rate of `1.0`.

        Raises:
            SpecError: the path leads into something that is neither a map nor a list, or past a list's end.
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
    """`part` as a key of the map `node`, or as an index of the list `node`."""
    above = dotted(override.path[:depth])
    if isinstance(node.content, dict):
        return part
    if not isinstance(node.content, list):
        _refuse(override.place, f"{above} is no map or list, so it has no {part!r}; it is set at {node.place}")
    size = len(node.content)
    if not (part.isascii() and part.isdigit() and len(part) < 10 and int(part) < size):
        numbers = f"with items 0 to {size - 1}" if size else "and is empty"
        _refuse(override.place, f"{above} is a list {numbers}, so it has no {part!r}")
    return int(part)


def _refuse(place: Place, message: str) -> NoReturn:
    raise SpecError([Problem(place, "", message)])
