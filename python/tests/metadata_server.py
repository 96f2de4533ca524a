"""A minimal HTTP metadata server as Mooncake's: values by key."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, urlsplit


class MetadataServer:
    """Serves `GET`, `PUT` and `DELETE` of `/metadata?key=…` inside the `with` block."""

    def __init__(self) -> None:
        values = self.values = dict[str, bytes]()
        # Keys that had a value when a client deleted them.
        deleted = self.deleted = set[str]()
        self.refusing = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status: int, body: bytes = b"") -> None:
                self.send_response(503 if outer.refusing else status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def key(self) -> str:
                return parse_qs(urlsplit(self.path).query)["key"][0]

            def do_GET(self) -> None:
                found = values.get(self.key())
                self.answer(404 if found is None else 200, found or b"metadata not found")

            def do_PUT(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not outer.refusing:
                    values[self.key()] = body
                self.answer(200, b"metadata updated")

            def do_DELETE(self) -> None:
                key = self.key()
                found = values.pop(key, None)
                if found is not None:
                    deleted.add(key)
                self.answer(404 if found is None else 200)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/metadata"

    def __enter__(self) -> MetadataServer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
