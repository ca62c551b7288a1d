"""Parses YAML into a tree of values with their positions.

Only a part of YAML is read: maps with text as keys, lists and scalars. Tags, anchors and aliases are refused, so that
no file can run code, or expand to more than its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from tfdist_cli.errors import code_of
from tfdist_cli.spec.loading.interpolation import read_scalar
from tfdist_cli.spec.loading.problems import KeyPath, Place, Problem, SpecError, dotted
from tfdist_cli.spec.loading.scalars import Scalar, is_text

DEEPEST = 50
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NOT_YAML = yaml.reader.Reader.NON_PRINTABLE
_PLAIN_STYLES = (None, "")
Mark = Any
"""A position of PyYAML's parser or of libyaml's, with `line` and `column` from 0; or None."""
_PLAIN_WORDS = (
    ("mapping values are not allowed", "a second ': ' in one line: put text that holds ': ' in quotes"),
    ("did not find expected key", "this does not fit the lines above: check its indentation, commas and quotes"),
    ("expected <block end>", "this does not fit the lines above: check its indentation, commas and quotes"),
    ("could not find expected ':'", "expected 'key: value'"),
    ("cannot start any token", "a value cannot start with this character: put it in quotes"),
    ("unexpected end of stream", "a quote is opened and never closed"),
)


@dataclass(frozen=True)
class Unusable:
    """The content of a node that cannot be used. It is reported only if no `--set` replaces it."""

    message: str
    code: str


@dataclass
class Node:
    """A value and its place.

    Args:
        content: a scalar, a map, a list, or the reason why there is none.
        place: where the value starts.
        key_place: where its key starts, if it is a value of a map.
    """

    content: Scalar | dict[str, Node] | list[Node] | Unusable
    place: Place
    key_place: Place | None = None

    def child(self, part: str | int) -> Node | None:
        """Returns the value at a key or an index; None if there is none."""
        if isinstance(self.content, dict) and isinstance(part, str):
            return self.content.get(part)
        if isinstance(self.content, list) and isinstance(part, int) and 0 <= part < len(self.content):
            return self.content[part]
        return None

    def plain(self) -> Any:
        """Returns the value as dicts, lists and scalars."""
        if isinstance(self.content, dict):
            return {key: node.plain() for key, node in self.content.items()}
        if isinstance(self.content, list):
            return [node.plain() for node in self.content]
        return self.content

    def problems(self, path: KeyPath = ()) -> Iterator[Problem]:
        """Yields a problem for each value that cannot be used."""
        if isinstance(self.content, Unusable):
            yield Problem(self.place, dotted(path), self.content.message, self.content.code)
        parts: Any = self.content if isinstance(self.content, list) else None
        parts = self.content.items() if isinstance(self.content, dict) else enumerate(parts or ())
        for part, node in parts:
            yield from node.problems((*path, part))


def read_yaml(text: str, source: str, environ: Mapping[str, str], *, marks: bool = True, depth: int = 0) -> Node:
    """Reads a document.

    Args:
        text: the YAML.
        source: the name of the file, for messages.
        environ: the environment variables for `${VAR}`.
        marks: whether messages have lines and columns.
        depth: the depth at which the document is put into another one.

    Raises:
        SpecError: it is not YAML, or uses a part of YAML that is not supported.
    """

    def place(mark: Mark) -> Place:
        return Place(source, mark.line + 1, mark.column + 1) if marks and mark else Place(source)

    unreadable = _NOT_YAML.search(text)
    if unreadable:
        start = unreadable.start()
        line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
        where = Place(source, line, column) if marks else Place(source)
        message = f"the character {unreadable[0]!r} is not allowed in YAML"
        raise SpecError([Problem(where, "", message, code="invalid-character")])
    try:
        return _Composer(yaml.parse(text, Loader=_Loader), place, environ).document(depth)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, place) from None
    except yaml.YAMLError as error:
        raise SpecError([Problem(Place(source), "", f"not YAML: {error}", code="not-yaml")]) from None


class _Composer:
    """Builds nodes from YAML's events. It is recursive, so that the depth is limited."""

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
            self._refuse(after, "a second document starts here: a file has one document", code="several-documents")
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
                message = "a key is text, not a list or a map: put text that contains { or [ in quotes"
                self._refuse(event, message, code="key-not-text")
            key, place = event.value, self._place(event.start_mark)
            value = self._node(next(self._events), depth, place)
            if key in entries:
                first = entries[key].key_place
                at = f" (first in line {first.line})" if first and first.line else ""
                value = Node(Unusable(f"the key is given twice{at}: remove one", code="duplicate-key"), place, first)
            elif event.style in _PLAIN_STYLES and not is_text(key):
                value = Node(Unusable(f"a key is text: put it in quotes, '{key}'", code="key-not-text"), place, place)
            entries[key] = value
        return entries

    def _scalar(self, event: yaml.ScalarEvent) -> Scalar | Unusable:
        try:
            value = read_scalar(event.value, self._environ, plain=event.style in _PLAIN_STYLES)
        except ValueError as error:
            return Unusable(str(error), code_of(error))
        # PyYAML's own parser, used where libyaml is missing, accepts "\ud800", which cannot be encoded in UTF-8.
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            return Unusable("half of a surrogate pair is not a character", code="invalid-character")
        return value

    def _check(self, event: yaml.Event, depth: int) -> None:
        tag = getattr(event, "tag", None)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            message = "anchors (&) and aliases (*) are not supported: write the value out, or put it in quotes"
            self._refuse(event, message, code="yaml-anchor")
        if tag is not None:
            message = f"tags such as {tag} are not supported: write a plain value, or put it in quotes"
            self._refuse(event, message, code="yaml-tag")
        if depth > DEEPEST:
            self._refuse(event, f"nested more than {DEEPEST} deep", code="nested-too-deep")

    def _refuse(self, event: yaml.Event, message: str, *, code: str) -> NoReturn:
        raise SpecError([Problem(self._place(event.start_mark), "", message, code)])


def _syntax_error(error: yaml.MarkedYAMLError, text: str, place: Callable[[Mark], Place]) -> SpecError:
    mark = error.problem_mark or error.context_mark
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    reason = f"{error.context or ''} {error.problem or ''}".strip()
    message = next((words for jargon, words in _PLAIN_WORDS if jargon in reason), f"not YAML: {reason}")
    if "\t" in line[: len(line) - len(line.lstrip())] or (mark and line[mark.column : mark.column + 1] == "\t"):
        return SpecError([Problem(place(mark), "", "YAML cannot be indented with tabs: use spaces", code="tab")])
    if "${" in line and ("{" in line.split("${")[0] or "[" in line.split("${")[0]):
        message = "between [ ] or { } put ${VAR} in quotes, or write the value on a line of its own"
        return SpecError([Problem(place(mark), "", message, code="variable-not-quoted")])
    return SpecError([Problem(place(mark), "", message, code="not-yaml")])
