"""What docs/benchmarks.md says of blocks that are mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common.markdown import table, wrapped

ABOUT = """
## A pool of LoRA blocks

`python -m benchmarks.adapters`: forward and backward of one layer of 1024 features with many blocks mixed, 8 rows of
128 tokens. `one` is Regard with one block; `loop` stacks each block's whole output, as SAPT's released code does;
`peft` goes over the adapters as its X-LoRA does; `base` is the layer alone. Memory is what PyTorch allocates at the
most beyond what the layer alone does.
"""
WRITING = """
Writing 64 tokens with 16 blocks, by `SharedAdapters.generate`, which weighs them by the prompt (Regard), and with those
weights given (given); with one block (one), and with one LoRA in peft; a Llama of 8 layers of width 512, 8 rows, rank
8.
"""


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """The tables of the races that were run, and which aims they meet."""
    layers = [one for one in rows if one["case"]["part"] == "layer"]
    written = [one for one in rows if one["case"]["part"] == "writing"]
    head = ("rank", "blocks", "one", "Regard ÷ one", "top_k=8 ÷ one", "loop ÷ Regard", "peft ÷ Regard", "base ÷ one")
    told = f"{ABOUT}\n{table((*head, 'Regard, MiB', 'top_k=8, MiB', 'loop, MiB'), map(_layer, layers))}\n"
    if written:
        lines = [
            (f"{_seconds(one, 'routed'):.2f} s", *(f"{_over(one, name, other):.2f}" for name, other in WRITERS))
            for one in written
        ]
        told += f"{WRITING}\n{table(WRITERS_HEAD, lines)}\n"
    return f"{told}\n{wrapped(_verdict(layers, written))}\n"


def gathering(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the choice between gathering a row's blocks and masking the others costs."""
    over = sorted(_seconds(one, "chosen") / min(_seconds(one, way) for way in ("gathered", "masked")) for one in rows)
    few = sorted(_over(one, "gathered", "masked") for one in rows)
    said = (
        f"With `top_k` a row's blocks are gathered where that is reckoned to be quicker than leaving others out of a "
        f"product with all of them (`python -m benchmarks.gathering`, {len(rows)} cases of 16 to 128 blocks and 1 to "
        f"128 tokens): gathering takes {few[0]:.2f} to {few[-1]:.2f} times as long, and what is chosen takes "
        f"{over[len(over) // 2]:.2f} times as long as the quicker of both in the median, {over[-1]:.2f} at the most."
    )
    return f"\n{wrapped(said)}\n"


def _layer(one: Mapping[str, Any]) -> tuple[str, ...]:
    """A line of the first table."""
    sparse = "top_k" in one["figures"]
    memories = (f"{_memory(one, name):.0f}" if name in one["figures"] else "–" for name in MEMORIES)
    return (
        *(str(one["case"][name]) for name in ("rank", "blocks")),
        f"{_seconds(one, 'one') * 1e3:.1f} ms",
        f"{_over(one, 'regard', 'one'):.2f}",
        f"{_over(one, 'top_k', 'one'):.2f}" if sparse else "–",
        *(f"{_over(one, name, 'regard'):.2f}" for name in ("loop", "peft")),
        f"{_over(one, 'base', 'one'):.2f}",
        *memories,
    )


MEMORIES = ("regard", "top_k", "loop")
WRITERS_HEAD = ("Regard", "Regard ÷ given", "Regard ÷ peft", "given ÷ peft", "one ÷ peft")
WRITERS = (("routed", "regard"), ("routed", "peft"), ("regard", "peft"), ("one", "peft"))


def _verdict(layers: Sequence[Mapping[str, Any]], written: Sequence[Mapping[str, Any]]) -> str:
    """How many cases meet each aim."""
    many = [one for one in layers if one["case"]["blocks"] == 128 and one["case"]["rank"] == 8]
    sparse = [one for one in layers if "top_k" in one["figures"]]
    aims = {
        "128 blocks of rank 8 at most 3 times one": [_over(one, "regard", "one") <= 3 for one in many],
        "the loop at least 3 times as long": [_over(one, "loop", "regard") >= 3 for one in many],
        "a tenth of its memory": [_memory(one, "regard") <= _memory(one, "loop") / 10 for one in many],
        "top_k=8 at most 1.5 times one": [_over(one, "top_k", "one") <= 1.5 for one in sparse],
        "writing at most 1.15 times peft": [_over(one, "routed", "peft") <= 1.15 for one in written],
    }
    told = (f"{name}: {sum(met)} of {len(met)}" for name, met in aims.items() if met)
    return f"Aims that are met, of the cases they are for: {'; '.join(told)}."


def _seconds(one: Mapping[str, Any], name: str) -> float:
    return float(one["figures"][name]["seconds"])


def _over(one: Mapping[str, Any], name: str, other: str) -> float:
    return _seconds(one, name) / _seconds(one, other)


def _memory(one: Mapping[str, Any], name: str) -> float:
    """MiB beyond what the layer alone allocates."""
    return float(one["figures"][name]["allocated"]) - float(one["figures"]["base"]["allocated"])
