import pytest

from tests.support.s3 import s3_server


@pytest.fixture(scope="session")
def server():
    """A real S3 server behind a proxy that fails chosen requests."""
    with s3_server() as s3:
        yield s3


@pytest.fixture
def s3(server, monkeypatch):
    """The server, empty, with the environment that s3fs needs."""
    server.clear()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server
