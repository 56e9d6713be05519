"""Checks of replaced models in graphs: `python -m tests.contracts.exporting CHECK FAMILY[=OPERATION]…`.

A process of its own: the type checks of the tests do not know symbolic sizes.
"""

import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import DynamicCache

import regard
from tests.contracts.conftest import _built, _inputs, _run
from tests.contracts.families import BY_NAME
from tests.contracts.test_replaced import constants_for, some
from tests.named_cache import behind


class Forward(nn.Module):
    """A model whose forward returns its first output alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **inputs: Tensor
    ) -> Tensor:
        given = {"input_ids": input_ids, "attention_mask": attention_mask} if input_ids is not None else {}
        return self.model(**given, **inputs, **self.options)[0]


def replaced(model: Any) -> Any:
    constants = constants_for(model)
    return regard.replaced(model, constants, some(constants))


def assert_same(program: Any, module: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Compare outputs at real tokens."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    found, expected = program(**inputs), module(**inputs)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)


def plain(name: str, padding: str, seed: int = 0) -> dict[str, Tensor]:
    """Return token ids and a mask alone, (3, 20)."""
    made = _inputs(BY_NAME[name], padding, seed)
    return {key: made[key] for key in ("input_ids", "attention_mask")}


def check_sizes(name: str, model: Any, make: Callable[[Any], Any] = replaced) -> None:
    """An exported program serves other numbers of rows and tokens."""
    fixed, sizes = Forward(make(model)).eval(), {0: Dim("rows", min=1, max=64), 1: Dim("tokens", min=2, max=24)}
    for used in (("input_ids",), ("input_ids", "attention_mask")):
        example = {key: plain(name, "right")[key] for key in used}
        program = torch.export.export(fixed, (), example, dynamic_shapes=dict.fromkeys(used, sizes), strict=False)
        for rows, tokens in ((2, 5), (1, 20)):
            cut = {key: tensor[:rows, -tokens:] for key, tensor in plain(name, "left", 5).items()}
            assert_same(program.module(), fixed, {key: cut[key] for key in used})


def check_trace(name: str, model: Any, make: Callable[[Any], Any] = replaced) -> None:
    """A trace serves other masks than that of its example."""
    fixed = Forward(make(model)).eval()
    batches = [plain(name, padding, seed=3) for padding in ("none", "left", "right")]
    for example in batches[:2]:
        trace = torch.jit.trace(fixed, tuple(example.values()), check_trace=False)
        for batch in batches:
            assert_same(lambda trace=trace, **given: trace(*given.values()), fixed, batch)


def check_onnx(name: str, model: Any, make: Callable[[Any], Any] = replaced) -> None:
    """The ONNX Runtime computes the same, of other sizes, too."""
    import onnxruntime

    fixed, sizes = Forward(make(model)).eval(), {0: "rows", 1: "tokens"}
    dynamic = {"input_ids": sizes, "attention_mask": sizes}
    options = {"dynamo": True, "dynamic_shapes": dynamic, "verbose": False}
    with tempfile.TemporaryDirectory() as folder:
        torch.onnx.export(fixed, (), kwargs=plain(name, "right"), **options).save(f"{folder}/model.onnx")
        session = onnxruntime.InferenceSession(f"{folder}/model.onnx")
    for padding, tokens in (("left", 20), ("right", 11)):
        batch = {key: tensor[:2, :tokens] for key, tensor in plain(name, padding, seed=6).items()}
        assert_same(partial(_run_session, session), fixed, batch)


def _run_session(session: Any, **inputs: Tensor) -> Tensor:
    return torch.tensor(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])


def check_graphs(name: str, model: Any, make: Callable[[Any], Any] = replaced) -> None:
    """torch.compile breaks no graph that was whole before, and the graphs compute the same."""
    fixed, inputs, breaks = make(model), _inputs(BY_NAME[name], BY_NAME[name].paddings[-1]), []
    for compiled in (model, fixed):
        torch._dynamo.reset()
        answer = torch._dynamo.explain(partial(_call, compiled))(inputs)
        breaks.append(answer.graph_break_count)
    assert breaks[1] <= breaks[0], f"{breaks}: {[reason.reason for reason in answer.break_reasons]}"
    torch._dynamo.reset()
    found, expected = _run(torch.compile(fixed, backend="eager"), inputs), _run(fixed, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def check_steps(name: str, model: Any, make: Callable[[Any], Any] = replaced) -> None:
    """A compiled step goes on with a cache that holds the keys of some heads of one layer, and none of another."""
    constants = constants_for(model)
    heads = [head for head in constants.heads if head[1] > 0 or head[2] < 2]
    fixed, ids = regard.replaced(model, constants, heads), plain(name, "none")["input_ids"]
    cache, expected = DynamicCache(config=model.config), fixed(ids, use_cache=False).logits
    fixed(ids[:, :9], **behind(cache))
    assert [layer.keys.shape[1] < layer.values.shape[1] for layer in cache.layers] == [True, True]
    compiled = torch.compile(fixed, backend="eager")
    found = [compiled(ids[:, i : i + 1], **behind(cache)).logits for i in range(9, 12)]
    torch.testing.assert_close(torch.cat(found, 1), expected[:, 9:12], rtol=1e-4, atol=1e-4)


def _call(model: Any, inputs: dict[str, Any]) -> Any:
    """Call a model with its hooks, which are a graph of their own where a module is explained by itself."""
    return model(**inputs)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with torch.no_grad():
        for argument in sys.argv[2:]:
            name, _, operation = argument.partition("=")
            make = partial(regard.replaced, constants=operation) if operation else replaced
            globals()[f"check_{sys.argv[1]}"](name, _built(name, BY_NAME[name].plain, torch.float32), make)
