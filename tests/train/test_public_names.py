"""The names that `tfdist_cli` offers are in the modules in which it looks for them."""

import pytest

import tfdist_cli


@pytest.mark.parametrize("name", tfdist_cli._MODULES)
def test_a_public_name_is_found(name):
    assert getattr(tfdist_cli, name).__name__ == name
