"""A real S3 server on this machine (moto's), and a proxy in front of it that fails chosen requests."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-of-a-test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test"}
FAULTS = ("503", "hang", "lost", "cut request", "cut response", "truncate")
_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server.

    Args:
        port: the server's port.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_at = port
        self.fault: Callable[[str, str], str | None] = lambda _method, _path: None
        """Returns the fault of a request, by its method and path, or None."""
        self.injected: Counter[str] = Counter()
        """How often each fault was injected."""
        self.requests: list[str] = []
        """The method and path of each request."""
        self.ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fault_of(self, method: str, path: str) -> str | None:
        with self._lock:
            self.requests.append(f"{method} {path}")
            fault = self.fault(method, path)
            if fault:
                self.injected[fault] += 1
            return fault

    def handle_error(self, request, client_address):
        """A client that gives up is expected."""


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def _pass_on(self):
        fault = self.server.fault_of(self.command, self.path)
        length = int(self.headers.get("Content-Length", 0))
        if fault in ("lost", "cut request"):
            self.rfile.read(length // 2 if fault == "cut request" else 0)
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if fault == "hang":
            self.server.ended.wait(60)
            self.close_connection = True
        elif fault == "503":
            self._answer(503, [("Content-Type", "application/xml")], _BUSY)
        else:
            self._forward(body, fault)

    def _forward(self, body, fault):
        headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
        if fault == "truncate":
            body = body[: len(body) // 2]
            headers = {k: v for k, v in headers.items() if "checksum" not in k.lower() and k.lower() != "content-md5"}
            headers["Content-Length"] = str(len(body))
        connection = HTTPConnection("127.0.0.1", self.server.server_at)
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if fault == "cut response" and not content:
            self.close_connection = True
            return
        kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
        self._answer(answer.status, kept, content, cut=fault == "cut response")
        connection.close()

    def _answer(self, status, headers, content, *, cut=False):
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut

    def log_message(self, format, *args):  # noqa: A002 http.server's name
        """Nothing is printed."""

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 http.server's names


class S3:
    """The server, the proxy in front of it, and a client that bypasses the proxy."""

    def __init__(self, server: Any, proxy: Proxy) -> None:
        import boto3  # noqa: PLC0415 takes 1 s, and tests without it import this module

        port = server.get_host_and_port()[1]
        self.proxy = proxy
        self.client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="direct",
            aws_secret_access_key="direct",
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which s3fs uses the proxy."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.proxy.url, "AWS_DEFAULT_REGION": "us-east-1"}

    def names(self, prefix: str = "") -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", ())]

    def clear(self) -> None:
        """Removes everything, and ends faults."""
        self.proxy.fault = lambda _method, _path: None
        self.proxy.injected.clear()
        self.proxy.requests.clear()
        for name in self.names():
            self.client.delete_object(Bucket=BUCKET, Key=name)


@contextmanager
def s3_server() -> Iterator[S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 as boto3

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    proxy = Proxy(server.get_host_and_port()[1])
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        s3 = S3(server, proxy)
        s3.client.create_bucket(Bucket=BUCKET)
        yield s3
    finally:
        proxy.ended.set()
        proxy.shutdown()
        proxy.server_close()
        server.stop()
        thread.join()
