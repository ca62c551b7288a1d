"""Requests that are left for a launcher."""

import json

import pytest

from tfdist_cli.launch.run.requests import ProfileRequest, ScaleRequest, post_request, take_requests


@pytest.mark.parametrize(
    "request_", [ScaleRequest("a", {"worker": 4, "ps": 2}, dry_run=True), ProfileRequest("b", "worker:1", 0.5)]
)
def test_a_request_is_taken_once(request_, tmp_path):
    with post_request(tmp_path, request_):
        assert list(take_requests(tmp_path)) == [request_]
        assert list(take_requests(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_one_that_no_process_has_taken_is_taken_back(tmp_path):
    with pytest.raises(KeyboardInterrupt), post_request(tmp_path, ScaleRequest("a", {"worker": 4})):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "{}", "[" * 9999),
        json.dumps({"kind": "scale", "replicas": {"boss": 3}}),
        json.dumps({"kind": "scale", "replicas": {"ps": "2"}}),
        json.dumps({"kind": "profile", "task": "boss:x", "seconds": 1}),
        json.dumps({"kind": "profile", "task": "worker:1", "seconds": "long"}),
    ],
)
def test_what_is_no_request_is_thrown_away(text, tmp_path):
    (tmp_path / "request-x.json").write_text(text)
    with post_request(tmp_path, ScaleRequest("a", {"ps": 1})):
        assert list(take_requests(tmp_path)) == [ScaleRequest("a", {"ps": 1})]
    assert list(take_requests(tmp_path)) == []
