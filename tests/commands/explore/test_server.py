"""The server of `regard explore`: who it answers, how much it takes, and what the page may do."""

import asyncio
import dataclasses
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra explore is not installed: starlette")
pytest.importorskip("uvicorn", reason="the extra explore is not installed: uvicorn")
pytest.importorskip("starlette.testclient", reason="httpx2 is not installed", exc_type=RuntimeError)

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from regard.commands.explore import server, session
from regard.errors import UserError
from tests.report.parsed import Parsed, assert_accessible

TOKEN = "a-token-of-the-test"
SETTINGS = {
    "title": "<i>title</i>",
    "text": "</script><img src=x onerror=alert(1)>",
    "heads": [["encoder", 0, 2]],
    "constants": ["zeros"],
    "operations": ["sigmoid"],
    "stages": ["<b>model</b>"],
    "reads_pairs": True,
    "characters": 100,
}


class Told:
    """A session that answers with what it was asked, waits, or fails."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Event()

    def settings(self) -> dict[str, Any]:
        return SETTINGS

    def answer(self, data: Any) -> dict[str, Any]:
        if data == "wait":
            self.begun.set()
            assert self.go.wait(20)
        if data == "refuse":
            raise UserError("heads: no such head")
        if data == "fail":
            raise RuntimeError("a secret of the inside")
        return {"asked": data}


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def client(told: Told) -> Iterator[TestClient]:
    app = server.make_app(told, TOKEN, "127.0.0.1")  # type: ignore[arg-type]
    with TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, data: Any = "hello", **headers: str) -> Any:
    return client.post(
        f"/{TOKEN}/answer", content=json.dumps(data), headers={"Content-Type": "application/json", **headers}
    )


def test_who_knows_the_token_gets_the_page_and_answers(client: TestClient) -> None:
    page = client.get(f"/{TOKEN}/")
    assert page.status_code == 200
    assert post(client).json() == {"asked": "hello"}
    assert "<img" not in page.text
    assert "<b>model" not in page.text
    assert "<i>" not in page.text
    assert_accessible(Parsed(page.text))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/answer",
        "/wrong/",
        "/wrong/answer",
        f"/{TOKEN}/../../etc/passwd",
        f"/{TOKEN}/page.js",
        f"/{TOKEN[:-1]}/",
        "/é/",
    ],
)
def test_without_the_token_there_is_nothing(path: str, client: TestClient) -> None:
    for method in ("GET", "POST"):
        refused = client.request(method, path, headers={"Content-Type": "application/json"})
        assert refused.status_code in (404, 405)
        assert TOKEN not in refused.text
        assert refused.headers["x-content-type-options"] == "nosniff"


def test_other_names_and_other_pages_are_refused(client: TestClient) -> None:
    for host, status in (("evil.example", 403), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403), ("", 403)):
        assert client.get(f"/{TOKEN}/", headers={"Host": host}).status_code == status
    for host in ("localhost:8000", "127.0.0.1:9", "[::1]:8000"):
        assert client.get(f"/{TOKEN}/", headers={"Host": host}).status_code == 200
    assert post(client, Origin="http://evil.example").status_code == 403
    assert post(client, Origin="null").status_code == 403
    assert post(client, Origin="http://127.0.0.1:8000").status_code == 200


def test_only_small_json_is_read(client: TestClient) -> None:
    assert post(client, **{"Content-Type": "text/plain"}).status_code == 415
    assert client.get(f"/{TOKEN}/answer").status_code == 405
    assert post(client, "a" * server.MAX_BODY).status_code == 413
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        refused = client.post(f"/{TOKEN}/answer", content=content, headers={"Content-Type": "application/json"})
        assert (refused.status_code, refused.json()) == (400, {"error": "expected JSON"})


def test_the_name_of_json_may_be_in_capitals(client: TestClient) -> None:
    assert post(client, **{"Content-Type": "Application/JSON; charset=utf-8"}).status_code == 200


def test_a_request_that_ends_early_is_no_failure_of_the_server() -> None:
    """A page that was closed left a traceback in the terminal."""
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(parts)

    with pytest.raises(HTTPException, match="the request ended before its last byte"):
        asyncio.run(server._read_json(Request({"type": "http", "headers": []}, receive)))


def test_errors_are_one_line_that_tells_nothing_of_the_inside(client: TestClient) -> None:
    refused = post(client, "refuse")
    assert (refused.status_code, refused.json()) == (400, {"error": "heads: no such head"})
    failed = post(client, "fail")
    assert failed.status_code == 500
    assert failed.json() == {"error": "the server failed with RuntimeError; its terminal says more"}
    assert post(client).status_code == 200


def test_one_request_at_a_time(client: TestClient, told: Told) -> None:
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(post(client, "wait")))
    first.start()
    assert told.begun.wait(20)
    assert post(client).status_code == 429
    told.go.set()
    first.join(20)
    assert [answer.status_code for answer in answers] == [200]
    assert post(client).status_code == 200


def test_many_requests_are_refused_until_a_while_has_passed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(server.time, "monotonic", lambda: clock[0])
    found = [post(client).status_code for _ in range(server.MAX_REQUESTS + 2)]
    assert found == [200] * server.MAX_REQUESTS + [429, 429]
    clock[0] += server.WINDOW
    assert post(client).status_code == 200


def test_the_server_leaves_the_logging_of_the_process_alone() -> None:
    class Handler(logging.Handler):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True
            super().close()

    handler = Handler()
    server.make_server(Starlette())
    assert not handler.is_closed
    handler.close()


def test_it_listens_on_this_machine_alone_unless_told() -> None:
    with server.listen("127.0.0.1", 0) as listening:
        address = server.address_of(listening, TOKEN)
        assert address == f"http://127.0.0.1:{listening.getsockname()[1]}/{TOKEN}/"
        with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1"):
            server.listen("127.0.0.1", listening.getsockname()[1])
    assert [server.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "a.b")] == [
        *(True, True, True),
        *(False, False, False),
    ]
    assert len({server.make_token() for _ in range(8)}) == 8
    assert len(server.make_token()) >= 32


def test_the_docs_name_every_route_and_field(client: TestClient) -> None:
    page = (Path(__file__).parents[3] / "docs" / "explore.md").read_text(encoding="utf-8")
    assert isinstance(client.app, Starlette)
    for route in client.app.routes:
        assert isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}:
            assert f"`{method} {route.path.replace('{token}', 'TOKEN')}`" in page
    for field in dataclasses.fields(session.Request):
        assert f"| `{field.name}` |" in page
