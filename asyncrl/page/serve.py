"""The page over HTTP on loopback. The page reads the run from its NATS server; this server has no data of the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from asyncrl.bus.address import BusAddress
from asyncrl.data.tokenizer import TaskTokenizer, TokenizerError
from asyncrl.errors import AsyncRLError
from asyncrl.page.html import login_fragment, page_html
from asyncrl.page.pieces import pieces_of
from asyncrl.ports import LOOPBACK
from asyncrl.run.connect import FoundRun
from topics.roles import MONITOR, OBSERVER

ROLES = (MONITOR, OBSERVER)


class NoWebsocket(AsyncRLError):
    """A browser cannot reach the server of a run."""


def browser_login(found: FoundRun, role: str) -> BusAddress:
    """Return the login with which a browser reads a run.

    Args:
        role: `monitor` reads everything, `observer` states, metrics and ids.

    Raises:
        NoWebsocket: the server has no websocket that is known.
        OSError, DamagedFile: the login cannot be read.
    """
    login = found.login or BusAddress.read(found.files.credentials / f"{role}.json")
    if not login.websocket:
        raise NoWebsocket(
            f"run {found.run} has no websocket for browsers: its server was started with nats.websocket = off, by an "
            "older version, or is not its own; of a server at nats.url, nats.websocket names the URL"
        )
    return login


@contextmanager
def served_page(found: FoundRun, role: str, port: int = 0) -> Iterator[str]:
    """Serve the page of a run on loopback; yields its URL, which has the login in its fragment.

    Args:
        port: 0 for any free one.

    Raises:
        NoWebsocket, OSError, DamagedFile: as of `browser_login`.
    """
    login = browser_login(found, role)
    model = found.files.model_path(found.files.read_config().model) if found.root is not None else None
    handler = _handler(page_html(login.websocket), cache(lambda: _pieces(model)))
    with ThreadingHTTPServer((LOOPBACK, port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_address[1]}/#{login_fragment(found.run, login, role)}"
        finally:
            server.shutdown()
            thread.join()


def _pieces(model: Path | None) -> bytes:
    """The texts of all tokens as JSON; `null` without the tokenizer."""
    if model is None:
        return b"null"
    try:
        return json.dumps(pieces_of(TaskTokenizer.load(model))).encode()
    except TokenizerError:
        return b"null"


def _handler(page: bytes, pieces: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers for the page and the texts of tokens."""

        def do_GET(self) -> None:
            """Send the page, or the texts of tokens."""
            if self.path == "/":
                self._send(page, "text/html; charset=utf-8")
            elif self.path == "/pieces.json":
                self._send(pieces(), "application/json")
            else:
                self.send_error(404)

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log no requests."""

    return Handler
