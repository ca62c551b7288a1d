"""YAML text → a tree of values that know where they stand.

Only the plain part of YAML is read: maps with text as keys, lists and scalars. Tags, anchors and aliases are refused,
which leaves nothing that could run code or grow beyond the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from tfdist_cli.spec.loading.interpolation import read_scalar
from tfdist_cli.spec.loading.problems import KeyPath, Place, Problem, SpecError
from tfdist_cli.spec.loading.scalars import Scalar, is_text

DEEPEST = 50
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_YAML = re.compile(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PLAIN_STYLES = (None, "")
Mark = Any
"""Of PyYAML's own parser or of libyaml's, or None: `line` and `column` from 0."""
_IN_PLAIN_WORDS = (
    ("mapping values are not allowed", "a second ': ' in one line: put text that holds ': ' in quotes"),
    ("did not find expected key", "this does not fit the lines above: check its indentation, commas and quotes"),
    ("expected <block end>", "this does not fit the lines above: check its indentation, commas and quotes"),
    ("could not find expected ':'", "expected 'key: value'"),
    ("cannot start any token", "a value cannot start with this character: put it in quotes"),
    ("unexpected end of stream", "a quote is opened and never closed"),
)


@dataclass(frozen=True)
class Broken:
    """Stands for a value that cannot be used; it matters only if nothing takes its place."""

    message: str


@dataclass
class Node:
    """A value and its place.

    Args:
        content: a scalar, a map, a list, or why there is none.
        place: where the value starts.
        key_place: where its key starts, for a value of a map.
    """

    content: Scalar | dict[str, Node] | list[Node] | Broken
    place: Place
    key_place: Place | None = None

    def child(self, part: str | int) -> Node | None:
        """The value at a key or an index."""
        if isinstance(self.content, dict) and isinstance(part, str):
            return self.content.get(part)
        if isinstance(self.content, list) and isinstance(part, int) and 0 <= part < len(self.content):
            return self.content[part]
        return None

    def plain(self) -> Any:
        """The value in dicts, lists and scalars."""
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content

    def broken(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Place, str]]:
        """Every value that cannot be used: its path, its place, and why."""
        if isinstance(self.content, Broken):
            yield path, self.place, self.content.message
        parts: Any = self.content if isinstance(self.content, list) else None
        parts = self.content.items() if isinstance(self.content, dict) else enumerate(parts or ())
        for part, node in parts:
            yield from node.broken((*path, part))


def read_yaml(text: str, source: str, environ: Mapping[str, str], *, marks: bool = True, depth: int = 0) -> Node:
    """Reads a document.

    Args:
        text: the YAML.
        source: what it comes from, for messages.
        environ: the variables that `${VAR}` is filled in from.
        marks: the lines and columns of `text` mean something to the user.
        depth: how deep in a file the document is to stand.

    Raises:
        SpecError: it is not YAML, or not the part of YAML that is read here.
    """

    def place(mark: Mark) -> Place:
        return Place(source, mark.line + 1, mark.column + 1) if marks and mark else Place(source)

    unreadable = _NOT_YAML.search(text)
    if unreadable:
        start = unreadable.start()
        line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
        where = Place(source, line, column) if marks else Place(source)
        raise SpecError([Problem(where, "", f"the character {unreadable[0]!r} cannot stand in YAML")])
    try:
        return _Composer(yaml.parse(text, Loader=_Loader), place, environ).document(depth)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, place) from None
    except yaml.YAMLError as error:
        raise SpecError([Problem(Place(source), "", f"not YAML: {error}")]) from None


class _Composer:
    """Makes nodes of YAML's events; recursive, and therefore bounded in depth."""

    def __init__(
        self, events: Iterator[yaml.Event], place: Callable[[Mark], Place], environ: Mapping[str, str]
    ) -> None:
        self._events = events
        self._place = place
        self._environ = environ

    def document(self, depth: int) -> Node:
        next(self._events)  # the start of the stream
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            return Node(None, self._place(None))
        node = self._node(next(self._events), depth)
        next(self._events)  # the end of the document
        if isinstance(after := next(self._events), yaml.DocumentStartEvent):
            self._refuse(after, "a second document starts here: one file holds one document")
        return node

    def _node(self, event: yaml.Event, depth: int, key_place: Place | None = None) -> Node:
        self._check(event, depth)
        node = Node(None, self._place(event.start_mark), key_place)
        if isinstance(event, yaml.ScalarEvent):
            node.content = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(item, depth + 1))
            node.content = items
        else:
            node.content = self._map(depth + 1)
        return node

    def _map(self, depth: int) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            self._check(event, depth)
            if not isinstance(event, yaml.ScalarEvent):
                self._refuse(event, "a key is text, not a list or a map: put text that holds { or [ in quotes")
            key, place = event.value, self._place(event.start_mark)
            value = self._node(next(self._events), depth, place)
            if key in entries:
                first = entries[key].key_place
                at = f" (first in line {first.line})" if first and first.line else ""
                value = Node(Broken(f"the key is given twice{at}: remove one"), place, first)
            elif event.style in _PLAIN_STYLES and not is_text(key):
                value = Node(Broken(f"a key is text: put it in quotes, '{key}'"), place, place)
            entries[key] = value
        return entries

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar | Broken:
        try:
            value = read_scalar(event.value, self._environ, plain=event.style in _PLAIN_STYLES)
        except ValueError as error:
            return Broken(str(error))
        # PyYAML's own parser, used where libyaml is not, lets "\ud800" through, which no file and no process can take.
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            return Broken("half of a surrogate pair is no character")
        return value

    def _check(self, event: yaml.Event, depth: int) -> None:
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            self._refuse(event, "anchors (&) and aliases (*) are not read: write the value out, or put it in quotes")
        if tag is not None:
            self._refuse(event, f"tags such as {tag} are not read: write a plain value, or put it in quotes")
        if depth > DEEPEST:
            self._refuse(event, f"nested more than {DEEPEST} deep")

    def _refuse(self, event: yaml.Event, message: str) -> NoReturn:
        raise SpecError([Problem(self._place(event.start_mark), "", message)])


def _syntax_error(error: yaml.MarkedYAMLError, text: str, place: Callable[[Mark], Place]) -> SpecError:
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    told = f"{error.context or ''} {error.problem or ''}".strip()
    message = next((words for jargon, words in _IN_PLAIN_WORDS if jargon in told), f"not YAML: {told}")
    if "\t" in line[: len(line) - len(line.lstrip())] or (mark and line[mark.column : mark.column + 1] == "\t"):
        message = "a tab cannot indent YAML: use spaces"
    elif "${" in line and ("{" in line.split("${")[0] or "[" in line.split("${")[0]):
        message = "between [ ] or { } a ${VAR} needs quotes, or give the value a line of its own"
    return SpecError([Problem(place(mark), "", message)])
