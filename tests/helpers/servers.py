"""Servers on loopback that shards are read from: HTTP with ranges, and S3."""

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock
from urllib.request import Request, urlopen

__all__ = ["http_server", "s3_server", "serve"]


class _Handler(SimpleHTTPRequestHandler):
    """Serves the files of a folder, and ranges of them."""

    protocol_version = "HTTP/1.1"  # keeps connections open

    def __init__(self, *arguments, requests: list[str], busy: Callable[[int], bool], file: str, **options):
        self.requests, self.busy, self.file = requests, busy, file
        super().__init__(*arguments, **options)

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        bounds = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        self.requests.append(f"{self.command} {self.path} {bounds[0] if bounds else ''}".rstrip())
        file = self.translate_path(self.path)
        if file.endswith(self.file) and self.busy(len(self.requests)):
            self.send_error(503)
            return
        if not os.path.isfile(file):
            self.send_error(404)
            return
        size = os.path.getsize(file)
        first, last = (int(bounds[1]), min(int(bounds[2] or size), size - 1)) if bounds else (0, size - 1)
        self.send_response(206 if bounds else 200)
        if bounds:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if self.command == "GET":
            with open(file, "rb") as stream:
                stream.seek(first)
                self.wfile.write(stream.read(last + 1 - first))

    def log_message(self, *arguments) -> None:
        pass


@contextmanager
def serve(handler: Callable) -> Iterator[str]:
    """Answer HTTP requests by ``http.server``; yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@contextmanager
def http_server(
    folder: str | os.PathLike, busy: Callable[[int], bool] = lambda number: False, file: str = ""
) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of a folder; yield the URL and a growing list of requests, ``GET /a.tar bytes=0-511``.

    Args:
        busy: whether request number 1, 2, ... gets the answer 503, if it is for a file of this name.
        file: the end of the name.
    """
    requests: list[str] = []
    options = {"directory": os.fspath(folder), "requests": requests, "busy": busy, "file": file}
    with serve(partial(_Handler, **options)) as url:
        yield url, requests


def _counting(app: Callable, answers: list[int]) -> Callable:
    """Return a WSGI application that notes how many bytes another one sends to GET requests."""

    def counting_app(environ: dict, start_response: Callable) -> list[bytes]:
        body = list(app(environ, start_response))
        if environ["REQUEST_METHOD"] == "GET":
            answers.append(sum(map(len, body)))
        return body

    return counting_app


@contextmanager
def s3_server(bucket: str = "bucket", answers: list[int] | None = None) -> Iterator[str]:
    """Serve S3 from memory; yield the URL of an empty bucket, which ``s3fs`` finds by environment variables.

    Args:
        bucket: its name.
        answers: receives the number of bytes in the body of each answer to a GET request.
    """
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    if answers is not None:
        server._server.app = _counting(server._server.app, answers)
    address = "http://{}:{}".format(*server.get_host_and_port())
    settings = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
    try:
        urlopen(Request(f"{address}/moto-api/reset", method="POST")).close()  # servers of a process share their buckets
        with mock.patch.dict(os.environ, settings | {"AWS_DEFAULT_REGION": "us-east-1"}):
            fsspec.get_filesystem_class("s3").clear_instance_cache()  # of another server
            fsspec.filesystem("s3").mkdir(bucket)
            yield f"s3://{bucket}"
    finally:
        server.stop()
