"""Nothing of a layer is read from its device while a model is watched: on a GPU each such read waits for the GPU."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode, resolve_name

import regard
from tests.hooks.test_fidelity import SMALL

READS = {
    *("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "masked_select", "equal", "is_nonzero", "allclose"),
    *("__bool__", "__int__", "__float__", "__index__", "__contains__", "unique", "unique_consecutive"),
}
"""Functions of tensors that wait for a GPU, for the value or for the size of the result."""
KINDS = {"bert": transformers.BertModel, "llama": transformers.LlamaModel, "mistral": transformers.MistralModel}
"""Mistral has sliding windows and eager attention set: its masks are those of all pairs."""
ON_CPU = ("regard/attention/tiles.py", "regard/attention/spans.py")
"""Read lengths and masks on a CPU alone."""


class CountReads(TorchFunctionMode):
    """Counts what would wait for a GPU, by function."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = name_function(function)
        is_mask = name == "__getitem__" and _has_mask(args[1])
        is_copy = name == "to" and any(str(value) == "cpu" for value in args[1:2] if isinstance(value, str))
        caller = sys._getframe(1).f_code.co_filename
        if (name in READS or is_mask or is_copy) and not caller.endswith(ON_CPU):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def name_function(function: Callable[..., Any]) -> str:
    """The last part of the name of a function of tensors."""
    return (resolve_name(function) or function.__name__).rsplit(".", 1)[-1]


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


def count_reads(
    kind: str, layers: int, padding: str, block: Callable[[Any], AbstractContextManager[Any]]
) -> Counter[str]:
    """Return the reads of a forward inside a block, and of those that end the block."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    torch.manual_seed(0)
    make = KINDS[kind]
    sizes |= {"sliding_window": 8, "num_key_value_heads": 2} if kind == "mistral" else {}
    config = make.config_class(vocab_size=99, **sizes)
    model = make._from_config(config, attn_implementation="eager" if kind == "mistral" else "sdpa").eval()
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    inputs = {"input_ids": torch.randint(5, 99, (2, 20))}
    if padding:
        inputs["attention_mask"] = (mask.flip(-1) if padding == "left" else mask).long()
    with torch.no_grad():
        with block(model):  # what is compared or looked up once is done
            model(**inputs)
        with CountReads() as reads, block(model):
            model(**inputs)
    return reads.counts


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind, padding", [(kind, side) for side in ("", "right", "left") for kind in KINDS])
def test_the_default_statistics_read_nothing_of_a_layer(kind: str, padding: str) -> None:
    few, many = (count_reads(kind, layers, padding, regard.watching) for layers in (2, 7))
    assert many == few
    assert few.total() <= 12


def test_the_stand_in_sees_reads() -> None:
    class Reading(nullcontext[None]):
        def __exit__(self, *_: object) -> None:
            values = torch.arange(3)
            assert bool(values[0] == 0)
            assert values[values > 0].tolist() == [1, 2]
            assert float(values[1].to("cpu")) == int(values[1].cpu()) == values[1].item()

    plain = count_reads("bert", 2, "", lambda _: nullcontext())
    reads = count_reads("bert", 2, "", lambda _: Reading())
    reads.subtract(plain)
    expected = ("__bool__", "__getitem__", "tolist", "to", "__float__", "cpu", "__int__", "item")
    assert {name: count for name, count in reads.items() if count} == dict.fromkeys(expected, 1)


def test_the_mask_of_an_encoder_is_not_searched_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many keys as tokens have none; whether some query sees a key reads the mask of all pairs."""
    monkeypatch.setattr("regard.hooks.sequences.hides_room", lambda *_: pytest.fail("searched"))
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    mask = torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    with regard.watching(model, "column_mass"):
        model(torch.arange(4, 14).view(2, 5), attention_mask=mask)
