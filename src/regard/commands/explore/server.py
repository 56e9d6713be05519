"""The page and its answers over HTTP: to this machine alone unless told otherwise, and to who knows the token.

The page can ask for nothing but answers: no path, name or address that it sends is opened.
"""

import base64
import hashlib
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from regard.commands.explore.page import make_page
from regard.commands.explore.session import Session
from regard.errors import UserError, describe_error

MAX_BODY = 256_000
"""Bytes of a request."""
MAX_REQUESTS, WINDOW = 20, 2.0
"""Requests in so many seconds."""
HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def make_token() -> str:
    """Return a new token."""
    return secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises UserError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"--host, --port: cannot listen on {host}, port {port}: {error.strerror or error}") from error


def address_of(listening: socket.socket, token: str) -> str:
    """Return the address of the page."""
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/{token}/"


def is_loopback(host: str) -> bool:
    """Return whether no other machine reaches a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a server of an application. Requests are not logged, for their addresses hold the token.

    It has no configuration of logging, which would close the handlers of everybody in the process.
    """
    options: dict[str, Any] = {"access_log": False, "server_header": False, "ws": "none"}
    options |= {"log_config": None, "log_level": "error"}
    return uvicorn.Server(uvicorn.Config(app, lifespan="off", limit_concurrency=32, **options))


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve until the process is interrupted."""
    with suppress(KeyboardInterrupt):
        make_server(app).run(sockets=[listening])


def make_app(session: Session, token: str, host: str) -> Starlette:
    """Return the application: the page at /TOKEN/, answers at /TOKEN/answer, and nothing else."""
    page = make_page(session.settings())
    policy = _content_policy(page)
    busy, recent = threading.Lock(), deque[float](maxlen=MAX_REQUESTS)

    def check_token(request: Request) -> None:
        if not secrets.compare_digest(request.path_params["token"].encode(), token.encode()):
            raise HTTPException(404, "not found")

    async def show(request: Request) -> Response:
        check_token(request)
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def answer(request: Request) -> Response:
        check_token(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, "expected application/json")
        data = await _read_json(request)
        now = time.monotonic()
        if len(recent) == MAX_REQUESTS and now - recent[0] < WINDOW:
            raise HTTPException(429, "too many requests; wait a second")
        recent.append(now)
        if not busy.acquire(blocking=False):
            raise HTTPException(429, "another request is being answered; wait for it")
        try:
            return JSONResponse(await run_in_threadpool(session.answer, data))
        except UserError as error:
            return JSONResponse({"error": describe_error(error)}, 400)
        finally:
            busy.release()

    async def guard(request: Request, follow: Callable[[Request], Awaitable[Response]]) -> Response:
        if _is_allowed(request, host):
            response = await follow(request)
        else:
            response = JSONResponse({"error": "this address is not served"}, 403)
        response.headers.update(HEADERS)
        return response

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code)

    async def fail(request: Request, error: Exception) -> Response:
        problem = f"the server failed with {type(error).__name__}; its terminal says more"
        return JSONResponse({"error": problem}, 500, headers=HEADERS)

    routes = [Route("/{token}/", show, methods=["GET"]), Route("/{token}/answer", answer, methods=["POST"])]
    handlers: dict[Any, Any] = {HTTPException: refuse, Exception: fail}
    middleware = [Middleware(BaseHTTPMiddleware, dispatch=guard)]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


async def _read_json(request: Request) -> Any:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise HTTPException(413, f"expected at most {MAX_BODY:,} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the request ended before its last byte") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "expected JSON") from error


def _is_allowed(request: Request, host: str) -> bool:
    """Return whether a request names this machine by a number or its own name, and comes from its own page.

    Another page can have its name lead to this machine (DNS rebinding), but the browser then still says its name.
    """
    named = request.headers.get("host", "")
    name = re.sub(r":\d+$", "", named).strip("[]")
    origin = request.headers.get("origin")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name not in ("localhost", host):
            return False
    return origin in (None, f"http://{named}")


def _content_policy(page: str) -> str:
    """Return a policy by which a browser runs the page's own scripts and styles and asks nobody else."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
