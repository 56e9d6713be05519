"""A probe of 15 epochs on hidden states computed once, against computing them anew in each epoch.

An encoder of MiniLM's shape (6 layers of width 384, 12 heads) with random weights, 64 tokens a sample, a third of them
real as in single sentences or all of them; float32, batches of 16. Contestants: a pass of the encoder with its states
kept on disk and the probe fitted to them (regard); the same probe on the same batches with the encoder run before each
step (recomputed, the reference); and the fit alone, which is what each further probe on the same states costs (fit).
Before the clock runs, the first two are checked to end at the same weights.

    python -m benchmarks.cached_probe [--quick] [--threads N] [--out FILE]     about 2 minutes on one core
"""

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from benchmarks.timing import device, keep, parser, prepared, race, row
from regard import training
from regard.training.probing import Batch

LENGTH, CLASSES, SEED = 64, 2, 0
CASES = [(32, 1 / 3), (32, 1.0)]
QUICK = [(16, 1.0)]


class Case:
    """One model, some samples with labels, and the ways to fit a probe."""

    def __init__(self, samples: int, real: float, *, small: bool) -> None:
        torch.manual_seed(0)
        size = (
            {"hidden_size": 48, "intermediate_size": 96} if small else {"hidden_size": 384, "intermediate_size": 1536}
        )
        layers = 2 if small else 6
        config = BertConfig(num_hidden_layers=layers, num_attention_heads=12, **size)
        self.model = BertModel(config, add_pooling_layer=False).to(device()).eval()
        self.ids = torch.randint(100, 1000, (samples, LENGTH))
        lengths = torch.randint(LENGTH // 6, LENGTH // 2 + 1, (samples, 1)) if real < 1 else torch.tensor([[LENGTH]])
        self.mask = (torch.arange(LENGTH) < lengths).expand(samples, LENGTH)
        self.labels = torch.randint(0, CLASSES, (samples,))
        self.settings = training.ProbeConfig(learning_rate=2e-5, batch_size=16, epochs=2 if small else 15)
        self.sizes = {"layers": layers + 1, "length": LENGTH, "width": size["hidden_size"], "classes": CLASSES}

    def inputs(self, rows: Tensor) -> dict[str, Tensor]:
        """What the model reads of these rows."""
        return {"input_ids": self.ids[rows], "attention_mask": self.mask[rows]}

    def encode(self, folder: str) -> training.States:
        """The states of one pass."""
        batches = (self.inputs(rows) for rows in torch.arange(len(self.ids)).split(self.settings.batch_size))
        return training.encode_states(self.model, batches, folder, mask=self.mask, key="bench", dtype=torch.float32)

    def fit(self, states: training.States) -> torch.nn.Module:
        """A probe fitted to kept states."""
        return training.fit_probe("sequence", states, self.labels, CLASSES, self.settings, SEED, device=device())

    def cached(self) -> torch.nn.Module:
        """A probe, with the pass before it."""
        with tempfile.TemporaryDirectory() as folder:
            return self.fit(self.encode(folder))

    def recomputed(self) -> torch.nn.Module:
        """The same probe, with the encoder run for each of its steps."""
        probe = training.make_probe("sequence", **self.sizes, dropout=self.settings.dropout, seed=SEED)

        def batches(seed: int, epoch: int) -> Iterator[Batch]:
            for rows in training.batch_rows(len(self.ids), self.settings.batch_size, seed, epoch):
                yield self.inputs(rows), self.mask[rows], self.labels[rows]

        training.train_through_encoder(self.model, probe, batches, (), self.settings, SEED)
        return probe

    def contestants(self, folder: str) -> dict[str, Callable[[], object]]:
        """Everybody, with states kept in the folder for the fit alone."""
        kept = self.encode(folder)
        return {"recomputed": self.recomputed, "regard": self.cached, "fit": lambda: self.fit(kept)}


def check(case: Case) -> None:
    """Both ways end at the same weights, up to the rounding of sums in another order."""
    cached, recomputed = case.cached(), case.recomputed()
    for one, other in zip(cached.parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    given: Any = prepared(parser(__doc__), arguments)
    check(Case(20, 1 / 3, small=True))
    rows = []
    for samples, real in QUICK if given.quick else CASES:
        case = Case(samples, real, small=given.quick)
        with tempfile.TemporaryDirectory() as folder:
            figures = race(case.contestants(folder), least=2, most=5, budget=40)
        told = {"samples": samples, "length": LENGTH, "real": f"{float(case.mask.float().mean()):.0%}"}
        keep(row(told | {"epochs": case.settings.epochs}, figures, "recomputed"), rows, "cached_probe", given.out)


if __name__ == "__main__":
    main()
