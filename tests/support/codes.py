"""Asserting which problem was reported: tests compare its code, never its wording."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tfdist_cli.errors import TfdistError

_LABEL = re.compile(r"\berror\[([a-z0-9-]+)\]:")


@contextmanager
def raises(error: type[TfdistError], code: str) -> Iterator[pytest.ExceptionInfo[TfdistError]]:
    """Like `pytest.raises`, and the error has to have this code."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"[{caught.value.code}] {caught.value}"


def codes_in(text: str) -> list[str]:
    """The codes of the errors printed in a program's output, in order."""
    return _LABEL.findall(text)
