"""The HTML file of the page: with the servers that it may connect to, or with the data of a report inside."""

from __future__ import annotations

import base64
import gzip
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from asyncrl.bus.address import BusAddress

_PAGE = Path(__file__).with_name("page.html")  # made by scripts/page
_CONNECT = "connect-src CONNECT"
_DATA = '<script type="application/octet-stream" id="data">'


def page_html(websocket: str) -> bytes:
    """Return the page; its browser may connect to these servers and to the server of the page, and to no other.

    Args:
        websocket: URLs with commas between.
    """
    allowed = escape(" ".join(["'self'", *websocket.split(",")]), quote=False).replace('"', "&quot;")
    return _PAGE.read_text(encoding="utf-8").replace(_CONNECT, f"connect-src {allowed}", 1).encode()


def report_html(data: bytes) -> bytes:
    """Return the page with data inside, as base64 of gzip, so that no text of a run is markup; it connects nowhere."""
    page = _PAGE.read_text(encoding="utf-8").replace(_CONNECT, "connect-src 'none'", 1)
    packed = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()
    return page.replace(_DATA, _DATA + packed, 1).encode()


def login_fragment(run: str, login: BusAddress, role: str) -> str:
    """Return the fragment of the page's URL: run, server and login. A browser sends no fragment to any server."""
    values = {"run": run, "ws": login.websocket, "user": login.user, "password": login.password, "role": role}
    return urlencode({name: value for name, value in (values | {"domain": login.domain}).items() if value})
