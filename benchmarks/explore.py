"""Time from a click on a head to the answer on the page of `regard explore`, in a headless Chromium on this machine.

MiniLM (its shape with random weights under --quick), and a decoder of 6 layers of width 512 with random weights. Time
is that of the wall, which browser, server and model take together. Writes the table of docs/explore.md.

    python -m benchmarks.explore [--quick] [--out FILE]     about a minute
"""

import argparse
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from benchmarks.look import MINILM, WORDS, made
from benchmarks.markdown import markdown_table
from benchmarks.timing import machine
from regard.commands.explore import server
from regard.commands.explore.session import Session
from regard.commands.explore.stages import Stages, make_stage
from regard.models import Loaded, load
from tests.report.chromium import Chromium

PAGE = Path(__file__).parents[1] / "docs" / "explore.md"
PLACE = re.compile(r"(?<=<!-- times -->\n).*?(?=<!-- end of times -->)", re.DOTALL)
DECODER = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
ENGLISH = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "reads", "of", "attention"]
CLICKS = """
(async () => {
  const [box, cells] = [document.querySelector("#explore"), [...document.querySelectorAll("[data-head]")]];
  const pause = (time) => new Promise((done) => setTimeout(done, time));
  const answered = () => new Promise((done) => {
    const watch = new MutationObserver(() => { watch.disconnect(); done(); });
    watch.observe(box, { attributeFilter: ["data-answers"] });
  });
  const times = [];
  for (let i = 0; i < COUNT; i++) {
    await pause(200);
    const answer = answered();
    const start = performance.now();
    cells[(5 * i) % cells.length].click();
    await answer;
    times.push(performance.now() - start);
  }
  return times;
})()
"""


class Timed(Session):
    """A session that notes the CPU time of its answers, which neighbors on the machine hardly touch."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seconds: list[float] = []

    def answer(self, data: Any) -> dict[str, Any]:
        """Return the answer."""
        start = time.thread_time()
        try:
            return super().answer(data)
        finally:
            self.seconds.append(time.thread_time() - start)


def measure(loaded: Loaded, words: int, text: str, clicks: int) -> tuple[str, ...]:
    """Return a row of the table."""
    stage = make_stage(loaded)
    session = Timed(Stages(loaded.name, [loaded.name], lambda index: stage), None, 256)
    with server.listen("127.0.0.1", 0) as listening, tempfile.TemporaryDirectory() as profile:
        running = server.make_server(server.make_app(session, "token", "127.0.0.1"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            with Chromium(Path(profile)) as browser:
                browser.show(1400)
                browser.open(server.address_of(listening, "token"))
                browser.wait("document.querySelector('#explore').dataset.answers === '1'")
                browser.run(f"document.querySelector('#text').value = {text!r}")
                browser.click("#read")
                browser.wait("document.querySelector('#explore').dataset.answers === '2'")
                times = browser.run(CLICKS.replace("COUNT", str(clicks)))
        finally:
            running.should_exit = True
            thread.join()
    spread, work = f"{min(times):.0f}–{max(times):.0f}", 1e3 * statistics.median(session.seconds[-clicks:])
    return loaded.name, str(words), f"{statistics.median(times):.0f}", spread, f"{work:.0f}"


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases, print the table, and write it into the page."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small cases, to see that it works")
    options.add_argument("--out", type=Path, default=PAGE, help="page to write the table into")
    given = options.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2} if given.quick else {}
    bert = made(BertModel(BertConfig(**{**MINILM, **layers}, vocab_size=len(WORDS)))) if given.quick else load("minilm")
    llama = made(LlamaForCausalLM(LlamaConfig(**{**DECODER, **layers}, vocab_size=len(WORDS))))
    rows = []
    for loaded, name, vocabulary in ((bert, "MiniLM", ENGLISH), (llama, "decoder of 6 layers", WORDS)):
        for words in (9,) if given.quick else (9, 100):
            text = " ".join(vocabulary[(7 * index) % len(vocabulary)] for index in range(words))
            named = Loaded(loaded.model, loaded.tokenizer, name, loaded.sha256)
            rows.append(measure(named, words, text, 3 if given.quick else 20))
            print(*rows[-1], flush=True)
    told = machine()
    head = ("model", "words", "median, ms", "fastest and slowest of 20", "CPU of the server, ms")
    about = f"{told['cpu']}, torch {told['torch']} on one thread, {told['date']}, beside other work on both cores."
    table = f"\n{markdown_table(head, rows)}\n\n{about}\n\n"
    print(table)
    if not given.quick:
        given.out.write_text(PLACE.sub(lambda _: table, given.out.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
