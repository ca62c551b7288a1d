"""Fixtures of an S3 server: a plugin of pytest, so that every test can use them."""

import pytest


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server behind a proxy that fails chosen requests."""
    from tests.support import s3  # noqa: PLC0415 few tests need its libraries, which import slowly

    with s3.s3_server() as server:
        yield server


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The server, empty, with the environment that s3fs needs."""
    s3_server.clear()
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server
