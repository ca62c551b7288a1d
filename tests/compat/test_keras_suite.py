"""What a test of Keras's says about tfdist: the outcomes that `keras_suite` prints."""

import pytest

from tests.compat.keras_suite import outcome_of
from tfdist_cli.errors import UsageError


def caused(cause):
    error = ValueError("within Keras")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, ("passed", "")),
        (UsageError("no", code="not-here"), ("refused", "not-here")),
        (caused(UsageError("no", code="not-here")), ("refused", "not-here")),
        (caused(None), ("failed", "ValueError: within Keras")),
        (ModuleNotFoundError("No module named 'grain'"), ("skipped", "No module named 'grain'")),
    ],
)
def test_a_test_passes_is_refused_with_a_code_or_fails(error, outcome):
    assert outcome_of(error) == outcome
