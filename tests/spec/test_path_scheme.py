from pathlib import Path

import pytest

from tests.support.codes import raises
from tfdist_cli.errors import InvalidValue, UsageError
from tfdist_cli.spec.path_scheme import Url, checked_location, location


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runs/x", Path("runs/x")),
        ("C:x", Path("C:x")),
        ("file:///data/x/", Path("/data/x")),
        ("file://localhost/data", Path("/data")),
        ("s3://bucket/run/", Url("s3://bucket/run")),
        ("S3://bucket", Url("s3://bucket")),
        (Path("gs://bucket/run"), Url("gs://bucket/run")),
        ("hdfs://user@host:9000/run", Url("hdfs://user@host:9000/run")),
        ("memory://run", Url("memory://run")),
    ],
    ids=str,
)
def test_paths_and_addresses(text, expected):
    found = location(text)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("ftp://host/x", "unsupported-scheme"),
        ("s3://", "empty-path"),
        ("s3://key:secret-text@bucket/x", "password-in-address"),
        ("ftp://key:secret-text@bucket/x", "password-in-address"),
    ],
)
def test_addresses_that_cannot_be_used(text, code):
    with pytest.raises(InvalidValue) as caught:
        location(text)
    assert caught.value.code == code
    assert "secret-text" not in str(caught.value)
    with raises(UsageError, code):
        checked_location(text)


def test_parts_of_an_address():
    url = Url("s3://bucket/models/digits")
    assert (url.scheme, url.name, url.parent, url / "1") == (
        "s3",
        "digits",
        "s3://bucket/models",
        "s3://bucket/models/digits/1",
    )
    assert Url("s3://bucket").parent == "s3://bucket"
