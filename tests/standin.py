"""HTTP servers that stand in for services no test can reach."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Answer = Callable[[str, str, str, bytes], tuple[int, Any]]
"""Method, path, authorization and body -> the status (0: the client has waited long enough) and a value for JSON."""


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server on a port of its own; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, value = answer(self.command, urlsplit(self.path).path, self.headers.get("Authorization") or "", body)
            content = b"" if value is None else json.dumps(value).encode()
            self.send_response(status or 504)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_HEAD = handle_any

        def handle(self) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a client that has left
                super().handle()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
