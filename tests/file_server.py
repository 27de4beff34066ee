"""A small server of files on this machine, which can be told to misbehave."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock


class FileServer(ThreadingHTTPServer):
    """Serves `files` by name.

    Attributes:
        ranges: whether it knows of ranges.
        limit: from where on it says that there is no such range.
        cut: after how many bytes it closes a connection.
        pause: seconds between two bytes of a file.
        header_pause: seconds between two lines of a header that does not end.
        requests: the range asked for, of every request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.cut: int | None = None
        self.limit = 1 << 40
        self.pause = self.header_pause = 0.0
        self.requests: list[str | None] = []

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def handle_error(self, request, client_address) -> None:
        pass  # a client that hangs up is part of the tests


class Handler(BaseHTTPRequestHandler):
    server: FileServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.requests.append(self.headers.get("Range"))
        content = self.server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        while self.server.header_pause:
            self.send_response_only(100)
            self.end_headers()
            time.sleep(self.server.header_pause)
        start = 0
        match = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if match and self.server.ranges:
            start = int(match[1])
            if start >= self.server.limit:
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        drops = len(content) if self.server.pause else 0
        for i in range(start, drops):
            self.wfile.write(content[i : i + 1])
            time.sleep(self.server.pause)
        self.wfile.write(content[max(start, drops) :][: self.server.cut])

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[FileServer]:
    here = mock.patch.dict(os.environ, {"no_proxy": "127.0.0.1"})
    with here, FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
