"""`regard explore` in a headless Chromium: clicks, undo, hostile text, and no request to anyone else."""

import json
import os
import re
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers

pytest.importorskip("starlette", reason="the extra explore is not installed: starlette")
pytest.importorskip("uvicorn", reason="the extra explore is not installed: uvicorn")

from regard.commands.explore import server
from regard.commands.explore.session import Session
from regard.commands.explore.stages import open_stages
from tests.report.chromium import Chromium, needs_chromium

MARKUP = ["</script><img/src=x/onerror=alert(1)>", "<b>bold</b>", "'\"--><svg/onload=alert(1)>"]
WORDS = ["<s>", "The", "cat", "sat", "on", "the", "mat", "because", "it", "was", *MARKUP]
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model some of whose words are markup."""
    folder = tmp_path_factory.mktemp("served")
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SIZES, vocab_size=len(WORDS), initializer_range=0.5)
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tf.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<s>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of its page, served by a thread."""
    session = Session(open_stages(str(folder), None, None, {}), None, 64)
    with server.listen("127.0.0.1", 0) as listening:
        running = server.make_server(server.make_app(session, "token", "127.0.0.1"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        yield server.address_of(listening, "token")
        running.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


class Page:
    """The page in the browser, opened anew."""

    def __init__(self, browser: Chromium, address: str) -> None:
        self.browser, self.answers = browser, 0
        browser.events.clear()
        browser.open("about:blank")
        browser.show(1000)
        browser.open(address)
        self.settle()

    def settle(self) -> None:
        """Wait for the next answer."""
        self.answers += 1
        self.browser.wait(f"Number(document.querySelector('#explore').dataset.answers) >= {self.answers}")

    def click(self, selector: str) -> None:
        self.browser.click(selector)
        self.settle()

    def text(self, selector: str) -> str:
        return str(self.browser.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def set(self, selector: str, value: str) -> None:
        field = f"document.querySelector({json.dumps(selector)})"
        self.browser.run(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('change'))")

    def replaced(self) -> list[str]:
        pressed = "[...document.querySelectorAll('[data-head][aria-pressed=true]')]"
        return list(self.browser.run(f"{pressed}.map((cell) => cell.getAttribute('aria-label'))"))


@pytest.mark.exhaustive
@needs_chromium
def test_clicks_replace_heads_and_undo_restores_them(browser: Chromium, address: str) -> None:
    page = Page(browser, address)
    plain = page.text("#prediction")
    assert "Next word" in plain
    assert "with replaced heads" not in plain
    page.set("#operation", "zeros")
    page.click("[data-head='decoder.1.0']")
    zeros = page.text("#prediction")
    assert "with replaced heads" in zeros
    assert "points" in zeros
    assert page.replaced() == ["layer 1, head 0: zeros"]
    assert page.browser.run("[document.querySelector('#layer-0').value, document.querySelector('#head-0').value]") == [
        *("1", "0")
    ]
    page.set("#operation", "window")
    page.set("#width", "2")
    page.click(".heads .layer")
    assert page.replaced() == [
        *("layer 0, head 0: softmax+window=2", "layer 0, head 1: softmax+window=2"),
        "layer 1, head 0: zeros",
    ]
    page.click("#undo")
    assert (page.replaced(), page.text("#prediction")) == (["layer 1, head 0: zeros"], zeros)
    page.set("#operation", "zeros")
    page.click("[data-head='decoder.1.0']")
    assert (page.replaced(), page.text("#prediction")) == ([], plain)
    browser.run("document.activeElement.blur()")
    browser.press("z", 90, control=True)
    page.settle()
    assert page.replaced() == ["layer 1, head 0: zeros"]
    page.click("#reset")
    assert (page.replaced(), page.text("#prediction")) == ([], plain)
    assert browser.complaints() == []


@needs_chromium
def test_hostile_text_stays_text_and_nobody_else_is_asked(browser: Chromium, address: str) -> None:
    page = Page(browser, address)
    page.set("#text", " ".join(["The", *MARKUP]))
    page.click("#read")
    found = browser.run("[...document.querySelectorAll('.token')].map((span) => span.textContent)")
    assert found[-3:] == MARKUP
    assert browser.run("document.querySelectorAll('img, b, svg[onload]').length") == 0
    page.set("#text", "x" * 30_000)
    page.click("#read")
    assert page.text("#said") == "text: expected at most 20,000 characters, got 30,000"
    page.click("#undo")
    assert page.text("#said").startswith("Read in ")
    complaints = browser.complaints()
    assert len(complaints) == 1
    assert "400" in complaints[0]  # of the text that was too long
    browser.run("fetch('https://example.invalid/').catch(() => null)")
    own = "const own = document.createElement('script'); own.textContent = 'window.hacked = 1'"
    browser.run(f"{{ {own}; document.body.append(own); }}")
    assert browser.run("window.hacked") is None
    refused = " ".join(one for one in browser.complaints() if "Content Security Policy" in one)
    assert "connect-src" in refused
    assert "script-src" in refused
    others = {one for one in browser.requests() if not one.startswith(address)}
    assert others <= {"about:blank", "https://example.invalid/"}


@pytest.mark.exhaustive
@needs_chromium
def test_what_was_typed_is_read_with_the_next_click(browser: Chromium, address: str) -> None:
    page = Page(browser, address)
    page.set("#text", "The other text")
    page.click("[data-head='decoder.1.0']")
    assert browser.run("document.querySelector('#text').value") == "The other text"
    assert len(browser.run("[...document.querySelectorAll('.token')].map((span) => span.textContent)")) == 3
    page.click("#undo")
    assert browser.run("document.querySelector('#text').value") != "The other text"


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_wider_than_a_phone(dark: bool, browser: Chromium, address: str) -> None:
    page = Page(browser, address)
    page.browser.show(400, dark=dark)
    page.click("[data-head='decoder.0.1']")
    wide = "[...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > innerWidth)"
    assert browser.run(f"{wide}.map((one) => one.tagName + one.id + one.getBoundingClientRect().right)") == []
    assert len(browser.picture()) > 20_000


def test_the_command_says_where_the_page_is_and_ctrl_c_ends_it(
    folder: Path, regard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def visit(listening: Any, token: str) -> str:
        address = address_of(listening, token)

        def wait() -> None:
            try:
                found.append(urllib.request.urlopen(address, timeout=60).status)
            finally:
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=wait).start()
        return address

    address_of = server.address_of
    monkeypatch.setattr(server, "address_of", visit)
    ended = regard("explore", folder, "--device", "cpu")
    assert (ended.code, ended.err.replace("\r", "").splitlines()[-1:], found) == (0, [], [200])
    assert re.fullmatch(r"Explore \S+ at http://127\.0\.0\.1:\d+/[\w-]{32}/ \(Ctrl-C ends it\)\n", ended.out)


def test_without_the_extra_the_command_says_what_to_install(
    regard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "regard.commands.explore.server")
    monkeypatch.delattr("regard.commands.explore.server")
    said = regard("explore", "minilm").complaint
    assert said == "regard explore: explore needs starlette and uvicorn: pip install 'regard[explore]'"
