"""The errors that users see."""

import sys
import traceback

from tfdist_cli.errors import TfdistError


def test_a_traceback_ends_with_the_hint():
    lines = traceback.format_exception(TfdistError("no such key", code="unknown-key", hint="use another"))
    # Python 3.10 prints no notes of an error.
    assert ("hint: use another\n" in lines) == (sys.version_info >= (3, 11))
    assert "use another" not in str(TfdistError("no such key", hint="use another"))
