"""Linear layers that store their weights in fewer bits, in the ways in which libraries do."""

from typing import Any

import torch
from torch import Tensor, nn


class PackedLinear(nn.Linear):
    """As bitsandbytes' `Linear4bit`: two weights in a byte of a column, and a scale for all."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.weight = nn.Parameter(self.random_weight(), requires_grad=False)

    def random_weight(self) -> Tensor:
        return torch.randint(0, 256, (self.out_features * self.in_features // 2, 1), dtype=torch.uint8)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.whole().to(states.dtype), self.bias)

    def whole(self) -> Tensor:
        packed: Any = self.weight.flatten()
        values = torch.stack([packed >> 4, packed & 15], -1).float() - 8
        return values.view(self.out_features, self.in_features) / 32


class ByteLinear(PackedLinear):
    """As `Linear8bitLt`: whole numbers in the place of the weights."""

    def random_weight(self) -> Tensor:
        return torch.randint(-127, 127, (self.out_features, self.in_features), dtype=torch.int8)

    def whole(self) -> Tensor:
        return self.weight.float() / 256


class OwnLinear(nn.Module):
    """As the layers of GPTQ, AWQ and HQQ: no `nn.Linear`, and no weight by that name."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.register_buffer("qweight", torch.randint(-7, 8, (inputs, outputs), dtype=torch.int8))
        self.register_buffer("bias", torch.randn(outputs) if bias else None)

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.whole().to(states.dtype), self.bias)

    def whole(self) -> Tensor:
        codes: Any = self.qweight
        return codes.T.float() / 32


class ScaledTensor(Tensor):
    """As the tensors of torchao and quanto: whole numbers and a scale, of which few operations are known."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls: Any, codes: Tensor, scale: Tensor) -> Any:
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        made = make(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        made.codes, made.scale = codes, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    def dequantize(self) -> Tensor:
        return self.codes * self.scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].dequantize(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes.clone(), args[0].scale.clone())
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class ScaledLinear(PackedLinear):
    """A linear layer whose weight is of a class that packs it; its own class is `nn.Linear`."""

    def random_weight(self) -> Tensor:
        codes = torch.randint(-127, 127, (self.out_features, self.in_features), dtype=torch.int8)
        return ScaledTensor(codes, torch.tensor(1 / 256))

    def whole(self) -> Tensor:
        weight: Any = self.weight
        return weight.dequantize()


KINDS = (PackedLinear, ByteLinear, ScaledLinear)


def quantize(model: Any, kind: type[nn.Module], names: tuple[str, ...]) -> Any:
    """Put layers with random weights in the place of those of these names in a model, and return it."""
    for path, layer in list(model.named_modules()):
        if path.endswith(names) and isinstance(layer, nn.Linear):
            quantized: Any = kind(layer.in_features, layer.out_features)
            if kind is ScaledLinear:
                plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
                plain.weight, quantized = quantized.weight, plain
            model.set_submodule(path, quantized)
    return model.eval()


def dequantize(model: Any, whole: Any) -> Any:
    """Write what the quantized layers of a model multiply by into another one of whole weights, and return that."""
    for path, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, OwnLinear)):
            weight: Any = getattr(layer, "weight", torch.empty(0))
            stored = layer.whole() if isinstance(layer, (PackedLinear, OwnLinear)) else None
            stored = weight.dequantize() if isinstance(weight.data, ScaledTensor) else stored
            if stored is not None:
                whole.get_submodule(path).weight.data = stored.clone()
    return whole
