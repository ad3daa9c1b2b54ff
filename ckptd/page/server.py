"""Serve the page on 127.0.0.1 to whoever has its token: read-only, with strict headers (docs/ui.md).

The token stands after `#` in the address that is printed, which a browser does not send; the page's script
sends it in a header. So it is in no log and no Referer, and another page, even one on another port of this
host, cannot use it, as it could a cookie.
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
from typing import TYPE_CHECKING

from ckptd.errors import CkptdError, UsageError, from_os_error
from ckptd.page import render

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ckptd.page.sources import LivePage

HOST = "127.0.0.1"
PORT = 8765
_HOSTS = (HOST, "localhost")
"""Names that a request may give to this server: a foreign name that leads here (DNS rebinding) is refused."""
_METHODS = ("GET", "HEAD")
_KEY = re.compile(r"j[0-9a-f]{12}(\.(older|why))?")
_MOST_KEYS = 1000
_MOST_REQUESTS = 32
"""Requests at a time; more are refused."""


def new_token() -> str:
    """Return a token that nobody guesses."""
    return secrets.token_urlsafe(24)


def listening(port: int | None) -> socket.socket:
    """Listen on 127.0.0.1; None: on the usual port, or where that is taken on a free one.

    Raises:
        CkptdError: it is taken, or not to be had.
    """
    try:
        return socket.create_server((HOST, PORT if port is None else port))
    except OSError as error:
        if port is None:
            return socket.create_server((HOST, 0))
        failed = from_os_error(error, f"port {port} of {HOST}")
        raise UsageError(failed.message, hint="another --port, or 0 for a free one") from error


def serve(page: LivePage, token: str, listener: socket.socket, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM; `say` is told the address.

    Raises:
        UsageError: the libraries of `ckptd[ui]` are not installed.
    """
    app = application(page, token)
    try:
        import uvicorn
    except ImportError as error:
        raise _not_installed(error) from error
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=1,
    )
    page.start()
    say(f"http://{HOST}:{listener.getsockname()[1]}/#token={token}")
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        page.stop()
        listener.close()


def application(page: LivePage, token: str) -> ASGIApp:
    """Return the application: `/`, which holds no data, and `/jobs`, which is given for the token alone.

    Raises:
        UsageError: the libraries of `ckptd[ui]` are not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import HTMLResponse, PlainTextResponse
        from starlette.routing import Route
    except ImportError as error:
        raise _not_installed(error) from error
    shell = render.shell_html()
    expected = f"Bearer {token}".encode()

    def index(_: Request) -> Response:
        return HTMLResponse(shell)

    # no coroutine: files are read in a thread, and the next request does not wait for them
    def jobs(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, expected):
            text = "the token is missing or wrong: open the address that `ckptd ui` printed\n"
            return PlainTextResponse(text, status_code=401, headers={"WWW-Authenticate": "Bearer"})
        return HTMLResponse(render.jobs_html(page.read(_opened(request.query_params.get("open")))))

    return _Guard(Starlette(routes=[Route("/", index), Route("/jobs", jobs)]))


def _opened(text: str | None) -> frozenset[str] | None:
    """Return the keys of what is open in the browser; whatever is none is left out."""
    if text is None:
        return None
    return frozenset(key for key in text.split(",")[:_MOST_KEYS] if _KEY.fullmatch(key))


class _Guard:
    """Refuse foreign host names and all but GET and HEAD; put strict headers on every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [
            (name.encode(), value.encode())
            for name, value in {
                "content-security-policy": render.live_policy(),
                "x-content-type-options": "nosniff",
                "x-frame-options": "DENY",
                "referrer-policy": "no-referrer",
                "cache-control": "no-store",
                "cross-origin-opener-policy": "same-origin",
                "cross-origin-resource-policy": "same-origin",
                "permissions-policy": "camera=(), geolocation=(), microphone=()",
            }.items()
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        refused = _refused(scope) if scope["type"] == "http" else None
        if refused is None:
            await self._app(scope, receive, send_with_headers)
            return
        status, text = refused
        allow = [(b"allow", ", ".join(_METHODS).encode())] if status == 405 else []
        headers = [(b"content-type", b"text/plain; charset=utf-8"), *allow]
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": f"{text}\n".encode()})


def _refused(scope: Scope) -> tuple[int, str] | None:
    """Return status and text for a request that is not answered."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or re.sub(r":\d{1,5}$", "", hosts[0]).lower() not in _HOSTS:
        return 421, f"this is {HOST} and nothing else: use that address (from elsewhere by ssh -L)"
    if scope["method"] not in _METHODS:
        return 405, "this page is read-only"
    return None


def _not_installed(error: ImportError) -> CkptdError:
    msg = f"ckptd ui needs a server library that cannot be loaded ({error})"
    return UsageError(msg, hint="pip install 'ckptd[ui]'; or ckptd status --html FILE, which writes the page")
