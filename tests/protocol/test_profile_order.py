"""Orders to profile, from a launcher to its task."""

import json

import pytest

from tfdist_cli.protocol.profile_order import ORDER_FILE, ProfileOrder, take_order, write_order

ORDER = ProfileOrder("a", 0.5, "profile/x.xplane.pb")


def test_an_order_is_taken_once(tmp_path):
    assert take_order(tmp_path) is None
    write_order(tmp_path, ORDER)
    assert take_order(tmp_path) == ORDER
    assert take_order(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", json.dumps({"request": "a", "seconds": -1, "path": "x"})])
def test_what_is_no_order_is_thrown_away(text, tmp_path):
    (tmp_path / ORDER_FILE).write_text(text)
    assert take_order(tmp_path) is None


def test_a_folder_that_is_gone_ends_no_launcher(tmp_path):
    write_order(tmp_path / "removed", ORDER)
    assert take_order(tmp_path / "removed") is None
