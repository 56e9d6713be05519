"""Who takes a step of training: Regard's decoder in its loop, a minimal module, Llama in a plain loop, the Trainer.

Each is a function of size, length and setting that gives a `Take`; all have the shape of a Llama with tied embeddings.
"""

import itertools
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.timing import clock, device, on_gpu
from regard.attention.spec import AttentionSpec
from regard.models import RegardConfig, RegardForCausalLM
from regard.training import TrainingConfig, train

TOKENS = 2048
RATE = 1e-4
Take = Callable[[int], list[float]]
"""Takes so many steps and one before; the seconds of each."""


@dataclass(frozen=True)
class Size:
    """The shape of a decoder with tied embeddings."""

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int

    @property
    def options(self) -> dict[str, Any]:
        """As the configurations of Transformers have it."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "max_position_embeddings": TOKENS,
            "tie_word_embeddings": True,
        }


@dataclass(frozen=True, order=True)
class Setting:
    """What everything is computed in, and whether it is compiled."""

    precision: str = "float32"
    compiled: bool = False

    def __str__(self) -> str:
        return self.precision + (" compiled" if self.compiled else "")

    def autocast(self) -> Any:
        """While it lasts the precision holds."""
        return torch.autocast(device().type, torch.bfloat16) if self.precision == "bfloat16" else nullcontext()


SIZES = {
    "tiny": Size(layers=2, width=32, heads=2, inner=64, vocabulary=256),
    "1M": Size(layers=4, width=128, heads=4, inner=256, vocabulary=2048),
    "10M": Size(layers=8, width=256, heads=8, inner=688, vocabulary=16384),
    "124M": Size(layers=12, width=768, heads=12, inner=2048, vocabulary=50304),
}


class Block(nn.Module):
    """A layer of the minimal module: joined projections, no caches, no masks."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, width = size.heads, size.width
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.joined, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * size.inner, bias=False), nn.Linear(size.inner, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """The stream after the layer."""
        parts = self.joined(self.before(x)).chunk(3, -1)
        query, key, value = (part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in parts)
        query, key = (_turned(part, cosine.to(part.dtype), sine.to(part.dtype)) for part in (query, key))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        gate, up = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Minimal(nn.Module):
    """A decoder in the manner of nanoGPT, with the parts of a Llama."""

    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(length).float(), 1e4 ** (-torch.arange(half).float() / half))
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def rows_of(size: Size, length: int) -> dict[str, Tensor]:
    """A batch of random tokens."""
    ids = torch.randint(size.vocabulary, (TOKENS // length, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(device())
    return {"input_ids": ids, "labels": ids}


def in_plain_loop(model: nn.Module, rows: Mapping[str, Tensor], setting: Setting) -> Take:
    """Steps of a loop as short as can be; the model gives its loss, alone or under that name."""
    called: Any = torch.compile(model) if setting.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        with setting.autocast():
            found = called(**rows)
            loss = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def take(steps: int) -> list[float]:
        ticks = [clock() for _ in range(steps + 1) if step()]
        return _apart(ticks)

    return take


def minimal(size: Size, length: int, setting: Setting) -> Take:
    """The minimal module in a plain loop."""
    return in_plain_loop(Minimal(size, length).to(device()), rows_of(size, length), setting)


def llama_of(size: Size) -> LlamaForCausalLM:
    """Llama of this shape."""
    return LlamaForCausalLM(LlamaConfig(**size.options, use_cache=False, attn_implementation="sdpa")).to(device())


def llama(size: Size, length: int, setting: Setting) -> Take:
    """Llama in a plain loop."""
    return in_plain_loop(llama_of(size), rows_of(size, length), setting)


class _Ticks(TrainerCallback):
    def __init__(self) -> None:
        self.ticks: list[float] = []

    def on_step_end(self, *_args: Any, **_options: Any) -> None:
        self.ticks.append(clock())


def in_trainer(model: Any, rows: list[dict[str, Any]], collator: Any = None, **options: Any) -> list[float]:
    """Train under the Trainer, which logs and saves nothing; when each step was over."""
    ticks = _Ticks()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            optim="adamw_torch_fused",
            use_cpu=not on_gpu(),
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        try:
            made = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator, callbacks=[ticks])
            made.remove_callback(PrinterCallback)
            made.train()
        finally:  # its precision is one for the process
            AcceleratorState._reset_state(reset_partial_state=True)
    return ticks.ticks


def trainer(size: Size, length: int, setting: Setting) -> Take:
    """Llama under the Trainer."""
    model, rows = llama_of(size), rows_of(size, length)
    samples = [{name: value[number].cpu() for name, value in rows.items()} for number in range(TOKENS // length)]
    options: dict[str, Any] = {"per_device_train_batch_size": len(samples), "learning_rate": RATE}
    options |= {"lr_scheduler_type": "constant", "weight_decay": 0.1, "adam_beta2": 0.95}
    options |= {"bf16": setting.precision == "bfloat16", "torch_compile": setting.compiled}

    def take(steps: int) -> list[float]:
        return _apart(in_trainer(model, samples, max_steps=steps + 1, **options))

    return take


def regard(size: Size, length: int, setting: Setting, spec: AttentionSpec | str = "softmax") -> Take:
    """Regard's decoder in Regard's loop."""
    model, rows = regard_of(size, spec), rows_of(size, length)
    losses = rows["labels"][:, 1:].numel()

    def take(steps: int) -> list[float]:
        ticks: list[float] = []
        plan = TrainingConfig(
            max_steps=steps + 1,
            batch_size=len(rows["input_ids"]),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            precision="bfloat16" if setting.precision == "bfloat16" else "float32",
            compile=setting.compiled,
        )
        train(
            model,
            plan,
            batch=lambda step: rows,
            loss=lambda called, part: called(**part, num_items_in_batch=1).loss,
            count=lambda part: losses,
            on_progress=lambda *_told: ticks.append(clock()),
            device=None if on_gpu() else "cpu",
        )
        return _apart(ticks)

    return take


def regard_of(size: Size, spec: AttentionSpec | str) -> RegardForCausalLM:
    """Regard's decoder of this shape."""
    return RegardForCausalLM(RegardConfig(**size.options, attention=spec)).to(device())


def _apart(ticks: list[float]) -> list[float]:
    """The times between the ends of steps."""
    return [after - before for before, after in itertools.pairwise(ticks)]


PEERS = {"regard": regard, "minimal": minimal, "llama": llama, "trainer": trainer}
