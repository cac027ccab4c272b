"""A web server in this process that keeps requests waiting, drops or refuses them, as a test says."""

from __future__ import annotations

import contextlib
import functools
import http.client
import http.server
import threading
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from pathlib import Path

Fault = Literal["never answers", "half of the body", "drops the connection", "is denied"]


class Stalling(http.server.ThreadingHTTPServer):
    """A server of the files in a folder, or in front of another server; requests of a file meet `faults`."""

    daemon_threads = True

    def __init__(self, source: Path | str) -> None:
        if isinstance(source, str):
            handler: Any = functools.partial(_Proxy, str(urlsplit(source).netloc))
        else:
            handler = functools.partial(_Files, directory=str(source))
        super().__init__(("127.0.0.1", 0), handler)
        self.faults: list[Fault] = []  # one for each request
        self.faulty = ""  # the end of the paths that have them
        self.requests: list[tuple[str, int]] = []  # paths, and the ports of the clients' connections
        self.is_over = threading.Event()  # ends the requests that stall
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


class _Faulty(http.server.BaseHTTPRequestHandler):
    """Answers a GET with the server's next fault, or `ask`s for the answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client to acknowledge its headers

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        path = urlsplit(self.path).path
        server.requests.append((path, self.client_address[1]))
        is_faulty = server.faults and path.endswith(server.faulty)
        fault = server.faults.pop(0) if is_faulty else None
        if fault is None:
            self.ask()
            return
        self.close_connection = True
        if fault == "half of the body":
            content = self.content()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
        elif fault == "is denied":
            self.send_error(403, "Forbidden")
            return
        if fault != "drops the connection":
            server.is_over.wait(60)

    ask: Any  # answers the request
    content: Any  # gives the body of the answer


class _Files(_Faulty, http.server.SimpleHTTPRequestHandler):
    def ask(self) -> None:
        http.server.SimpleHTTPRequestHandler.do_GET(self)

    def content(self) -> bytes:
        with open(self.translate_path(self.path), "rb") as file:
            return file.read()


class _Proxy(_Faulty):
    def __init__(self, netloc: str, *args: Any) -> None:
        self._netloc = netloc
        super().__init__(*args)

    def _ask(self) -> tuple[http.client.HTTPResponse, bytes]:
        client = http.client.HTTPConnection(self._netloc)
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        client.request(self.command, self.path, sent, dict(self.headers))
        with contextlib.closing(client), client.getresponse() as answer:
            return answer, answer.read()

    def ask(self) -> None:
        answer, content = self._ask()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in {"content-length", "transfer-encoding", "connection", "date", "server"}:
                self.send_header(name, value)
        length = answer.headers["Content-Length"] if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    def content(self) -> bytes:
        return self._ask()[1]

    do_HEAD = ask  # noqa: N815  # http.server calls it by this name
