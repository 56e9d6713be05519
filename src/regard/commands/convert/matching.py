"""The first stage: each layer's attention against the untouched model's, on the untouched model's hidden states."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.models.model_files import eval_mode


class LayerMatch:
    """The relative error of attention modules of a model against those of its teacher, of the same names.

    While `installed`, `loss` runs the teacher, then the model; each of the model's modules is given the teacher's
    output to pass on, so that every layer sees the hidden states of the teacher and is matched by itself (LoLCATs,
    Zhang et al. 2024, arXiv 2410.10254, stage 1).

    Attributes:
        scales: Mean square of an entry of each module's output in the teacher, which errors are divided by.
        errors: Σ over tokens of the relative error of each module, in the last forward.
    """

    def __init__(self, teacher: nn.Module, names: Sequence[str]) -> None:
        self.teacher, self.names = teacher, tuple(names)
        self.scales: dict[str, float] = {}
        self.errors: dict[str, Tensor] = {}
        self._expected: dict[str, list[Tensor]] = {}

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Register the hooks on the teacher and on a model."""
        with ExitStack() as stack:
            for name in self.names:
                of_teacher = self.teacher.get_submodule(name).register_forward_hook(partial(self._keep, name))
                of_model = model.get_submodule(name).register_forward_hook(partial(self._judge, name))
                stack.callback(of_teacher.remove)
                stack.callback(of_model.remove)
            yield

    def measure_scales(self, batches: Iterable[Tensor]) -> None:
        """Learn the scale of each module from batches of token ids (row, token)."""
        sums, counts = dict.fromkeys(self.names, 0.0), dict.fromkeys(self.names, 0)
        for rows in batches:
            self._run_teacher({"input_ids": rows})
            for name, outputs in self._expected.items():
                sums[name] += sum(float(output.double().square().sum()) for output in outputs)
                counts[name] += sum(output.numel() for output in outputs)
        self._expected = {}
        self.scales = {name: sums[name] / counts[name] for name in self.names}

    def loss(self, model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        """Return Σ over tokens of the mean over modules of |o − o*|² / E|o*|², without dropout."""
        self._run_teacher(rows)
        self.errors = {}
        with eval_mode(model):
            model(**rows, use_cache=False)
        self._expected = {}
        return torch.stack([self.errors[name] for name in self.names]).mean(0)

    def _run_teacher(self, rows: Mapping[str, Tensor]) -> None:
        self._expected = {name: [] for name in self.names}
        with torch.no_grad():
            self.teacher(**rows, use_cache=False)

    def _keep(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if name in self._expected:
            self._expected[name].append(_first(output).detach())

    def _judge(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not self._expected.get(name):
            return None  # a forward without the teacher, as for validation
        actual, expected = _first(output), self._expected[name].pop(0)
        error = (actual.float() - expected.float()).square().mean(-1).sum() / max(self.scales[name], 1e-12)
        self.errors[name] = self.errors[name] + error if name in self.errors else error
        return (expected, *output[1:]) if isinstance(output, tuple) else expected


def _first(output: Any) -> Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, Tensor):
        raise UserError(f"model: expected attention modules that return a tensor first, got {type(tensor).__name__}")
    return tensor
