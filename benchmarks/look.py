"""What a look at a text takes, beside one forward of the same text, and what its page weighs.

MiniLM (its shape with random weights under --quick) on 100 words, and a decoder of 32 layers with 32 heads of width 4
on 2,000 tokens. Time is that of `look_at` and the page; the model is loaded before, and has been verified. The floor is
the forward and, of each layer, scores and exponentials of every pair that is seen, in blocks of rows by plain PyTorch.
Where there is a Chromium, it opens the page: `open_seconds` pass until it has its picture, less those of an empty one.

    python -m benchmarks.look [--quick] [--threads N] [--out FILE]     about 3 minutes on one core
"""

import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

import regard
from benchmarks.timing import keep, parser, prepared, race, row
from regard.models import Loaded, load

WORDS = [f"word{number}" for number in range(500)]
MINILM = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
DECODER = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 32, "num_attention_heads": 32}


def made(model: Any) -> Loaded:
    """Return a model of random weights with a tokenizer of words."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=WORDS[0])
    return Loaded(model.eval(), tokenizer, type(model).__name__, None)


ROWS, ENTRIES = 128, 1 << 19
"""Rows of a block of the floor, and its entries at the most: what fits the cache."""


def exponentiate(query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> None:
    """Compute exp(s − max s) of every pair of a layer (head, token, width) that is seen, block by block."""
    tokens = query.shape[1]
    heads = max(1, ENTRIES // (ROWS * tokens))
    for first in range(0, len(query), heads):
        for start in range(0, tokens, ROWS):
            end = min(start + ROWS, tokens)
            seen = key[first : first + heads, : end if causal else tokens]
            scores = torch.bmm(query[first : first + heads, start:end], seen.mT)
            torch.exp_(scores.sub_(scores.amax(-1, keepdim=True)))


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--disable-background-networking")


def open_seconds(page: str, turns: int) -> float | None:
    """Return the median seconds by which a browser pictures a page later than an empty one; None without a browser."""
    if CHROMIUM is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "page.html").write_text(page, encoding="utf-8")
        (folder / "empty.html").write_text("<!doctype html><title>Empty</title>", encoding="utf-8")
        later = [_picture_seconds(folder, "page") - _picture_seconds(folder, "empty") for _ in range(turns)]
    return statistics.median(later)


def _picture_seconds(folder: Path, name: str) -> float:
    assert CHROMIUM is not None
    picture = folder / f"{name}.png"
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={folder / 'profile'}", f"--screenshot={picture}"]
    start = time.perf_counter()
    subprocess.run([*command, (folder / f"{name}.html").as_uri()], check=True, capture_output=True, timeout=120)
    seconds = time.perf_counter() - start
    picture.unlink()  # an error if it was not written
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Run both cases and write the result."""
    given = prepared(parser(__doc__), arguments)
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 2} if given.quick else {}
    bert = made(BertModel(BertConfig(**{**MINILM, **layers}, vocab_size=len(WORDS)))) if given.quick else load("minilm")
    llama = made(LlamaModel(LlamaConfig(**{**DECODER, **layers}, vocab_size=len(WORDS), max_position_embeddings=4096)))
    english = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "reads", "of", "attention"]
    cases = {
        "MiniLM": (bert, 20 if given.quick else 100, english if not given.quick else WORDS),
        "32 layers × 32 heads": (llama, 64 if given.quick else 2000, WORDS),
    }
    rows = []
    for name, (loaded, count, words) in cases.items():
        text = " ".join(words[(7 * index) % len(words)] for index in range(count))
        loaded.model.to(given.device)
        ids = loaded.tokenizer(text, return_tensors="pt")["input_ids"].to(given.device)
        page = regard.look(loaded, text=text).page()

        def plain(loaded: Loaded = loaded, ids: Any = ids) -> object:
            return loaded.model(ids)

        def look(loaded: Loaded = loaded, text: str = text) -> object:
            return regard.look(loaded, text=text).page()

        config = loaded.model.config
        shape = config.num_attention_heads, ids.shape[1], config.hidden_size // config.num_attention_heads
        query, key = torch.randn(2, *shape, device=given.device)

        def floor(run: Any = plain, pair: Any = (query, key), config: Any = config) -> None:
            run()
            for _ in range(config.num_hidden_layers):
                exponentiate(*pair, causal=config.model_type == "llama")

        figures = race({"plain": plain, "floor": floor, "regard": look}, least=1, most=5, budget=20)
        case = {"model": name, "batch": 1, "length": ids.shape[1], "bytes": len(page.encode())}
        opened = {"open_seconds": open_seconds(page, 1 if given.quick else 5)}
        keep(row(case, figures, "plain") | opened, rows, "look", given.out)


if __name__ == "__main__":
    main()
