"""Requests that are left for a launcher."""

import json

import pytest

from tfdist_cli.launch.run.requests import Request, post_request, take_requests


def test_a_request_is_taken_once(tmp_path):
    with post_request(tmp_path, {"worker": 4, "ps": 2}, dry_run=True) as request:
        assert list(take_requests(tmp_path)) == [Request(request.number, {"worker": 4, "ps": 2}, dry_run=True)]
        assert list(take_requests(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_one_that_no_process_has_taken_is_taken_back(tmp_path):
    with pytest.raises(KeyboardInterrupt), post_request(tmp_path, {"worker": 4}, dry_run=False):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", json.dumps({"replicas": {"boss": 3}}), "[" * 9999, '{"replicas": {"ps": "2"}}']
)
def test_what_is_no_request_is_thrown_away(text, tmp_path):
    (tmp_path / "request-x.json").write_text(text)
    with post_request(tmp_path, {"ps": 1}, dry_run=False) as request:
        assert list(take_requests(tmp_path)) == [Request(request.number, {"ps": 1})]
    assert list(take_requests(tmp_path)) == []
