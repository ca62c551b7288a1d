"""The strings of ids beside the rows of a table, as bytes in rows of a fixed width: NumPy alone.

A row has the bytes of its string, then `WHOLE`, or `CUT` if the string has more bytes than are kept, then zeros.
"""

from __future__ import annotations

import codecs

import numpy as np

WHOLE, CUT = 1, 2
ELLIPSIS = "…"
"""The end of a string that was cut."""


def row_width(string_bytes: int) -> int:
    """Returns the width of the rows if so many bytes of each string are kept."""
    return string_bytes + 1


def decoded(rows: np.ndarray) -> np.ndarray:
    """Returns the strings in rows as an array of `str`, shape (n,).

    Bytes that are not UTF-8 become surrogates, as in Python's names of files. A string that was cut ends with
    `ELLIPSIS`, after its last complete character.

    Args:
        rows: uint8, shape (n, width).
    """
    width = rows.shape[1]
    ends = width - 1 - (rows[:, ::-1] != 0).argmax(axis=1)
    found, content = np.empty(len(rows), object), rows.tobytes()
    for number, (end, mark) in enumerate(zip(ends.tolist(), rows[np.arange(len(rows)), ends].tolist(), strict=True)):
        text = content[number * width : number * width + end]
        if mark == CUT:
            complete = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(text)
            found[number] = complete + ELLIPSIS
        else:
            found[number] = text.decode("utf-8", "surrogateescape")
    return found
