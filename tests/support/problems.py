"""The problems that loading a file reports."""

from collections.abc import Callable
from typing import Any

import pytest

from tfdist_cli.spec.loading.problems import Problem, SpecError


def problems_of(loader: Callable[..., Any], *args: Any) -> tuple[Problem, ...]:
    """Calls a loader that has to fail, and returns what is wrong with its files."""
    with pytest.raises(SpecError) as caught:
        loader(*args)
    assert caught.value.problems
    return caught.value.problems


def codes_of(loader: Callable[..., Any], *args: Any) -> list[str]:
    """The codes of the problems."""
    return [problem.code for problem in problems_of(loader, *args)]
