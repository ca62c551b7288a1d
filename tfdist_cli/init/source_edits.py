"""Edits of a program's text that keep everything else as it is."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Sequence

_INDENT = "    "
_WIDTH = 100
_STRINGS = {tokenize.STRING, *(getattr(tokenize, name) for name in ("FSTRING_MIDDLE",) if hasattr(tokenize, name))}


class Source:
    """The text of a program. All lines are those of the original text, from 1.

    Args:
        text: the text.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = text.splitlines(keepends=True)
        if self._lines and not self._lines[-1].endswith("\n"):
            self._lines[-1] += "\n"
        self._replaced: list[tuple[int, int, int, int, str]] = []
        self._indented: set[int] = set()
        self._inserted: dict[int, list[str]] = {}

    def of(self, node: ast.expr) -> str:
        """Returns the text of an expression."""
        return ast.get_source_segment(self._text, node) or ast.unparse(node)

    def replace_call(self, call: ast.Call, function: str, arguments: Sequence[str]) -> None:
        """Replaces a call."""
        line, end = call.lineno, call.end_lineno or call.lineno
        flat = f"{function}({', '.join(arguments)})"
        if len(flat) + call.col_offset > _WIDTH or any("\n" in each for each in arguments):
            own = self._lines[line - 1]
            indent = own[: len(own) - len(own.lstrip())]
            inner = "".join(f"{indent}{_INDENT}{each},\n" for each in arguments)
            flat = f"{function}(\n{inner}{indent})"
        self._replaced.append((line, call.col_offset, end, call.end_col_offset or 0, flat))

    def indent_under(self, first: int, last: int, header: str) -> None:
        """Indents lines, and puts a header above them. The lines within strings stay as they are."""
        own = self._lines[first - 1]
        self._inserted.setdefault(first - 1, []).append(own[: len(own) - len(own.lstrip())] + header)
        self._indented |= set(range(first, last + 1)) - self._within_strings()

    def insert_line(self, after: int, text: str) -> None:
        """Inserts a line after another one; 0 for the first line."""
        self._inserted.setdefault(after, []).insert(0, text)

    def edited(self) -> str:
        """Returns the text with all edits."""
        lines = dict(enumerate(self._lines, 1))
        for line, column, end, end_column, text in sorted(self._replaced, reverse=True):
            before = lines[line].encode()[:column].decode()
            lines[line] = before + text + lines[end].encode()[end_column:].decode()
            for gone in range(line + 1, end + 1):
                lines[gone] = ""
        for number in self._indented:
            parts = lines[number].splitlines(keepends=True)
            lines[number] = "".join(_INDENT + part if part.strip() else part for part in parts)
        for after, texts in self._inserted.items():
            lines[after] = lines.get(after, "") + "".join(f"{text}\n" for text in texts)
        return "".join(text for _, text in sorted(lines.items()))

    def _within_strings(self) -> set[int]:
        """Returns the lines that begin within a string."""
        found: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self._text).readline):
            if token.type in _STRINGS:
                found.update(range(token.start[0] + 1, token.end[0] + 1))
        return found
