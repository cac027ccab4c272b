"""A web server in this process that keeps requests waiting, or drops them, as a test says."""

from __future__ import annotations

import functools
import http.server
import threading
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

Fault = Literal["never answers", "half of the body", "drops the connection"]


class Stalling(http.server.ThreadingHTTPServer):
    """A server of the files in a folder; the next requests of a file do what `faults` says.

    Attributes:
        faults: One for each request.
        faulty: The end of the paths that have them; every path by default.
        requests: The path of each request, and the port of the client's connection.
        is_over: Ends the requests that stall.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
        self.faults: list[Fault] = []
        self.faulty = ""
        self.requests: list[tuple[str, int]] = []
        self.is_over = threading.Event()
        self._serving = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Stalling:
        self._serving.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.is_over.set()
        self.shutdown()
        self._serving.join()
        super().__exit__(*args)


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        server.requests.append((self.path, self.client_address[1]))
        is_faulty = server.faults and self.path.endswith(server.faulty)
        fault = server.faults.pop(0) if is_faulty else None
        if fault is None:
            super().do_GET()
            return
        self.close_connection = True
        if fault == "half of the body":
            with open(self.translate_path(self.path), "rb") as file:
                content = file.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
        if fault != "drops the connection":
            server.is_over.wait(60)
