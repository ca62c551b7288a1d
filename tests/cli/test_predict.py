"""`tfdist predict`: what it prints while it predicts."""

from types import SimpleNamespace

import pytest

from tfdist_cli.cli import predict


@pytest.mark.parametrize(
    ("done", "parts", "examples", "text"),
    [
        (0, None, "", ""),
        (1, None, "", "1 part\n"),
        (3, None, "", "3 parts\n"),
        (0, 4, "", "0 of 4 parts\n"),
        (3, 4, "300 examples", "3 of 4 parts, 300 examples\n"),
    ],
)
def test_the_number_of_parts_is_printed_as_soon_as_it_is_known(done, parts, examples, text, capsys):
    predict._print_progress(SimpleNamespace(parts=parts, done=lambda: set(range(done))), examples)
    assert capsys.readouterr().err == text
