"""The configuration of a pre-training run, and the presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from regard.errors import UserError, check_choice
from regard.runs.config import MAX_SEED, Config, config_field
from regard.runs.idle_options import IdleOptions

if TYPE_CHECKING:
    from regard.attention.spec import AttentionSpec
    from regard.models import RegardConfig
    from regard.training import TrainingConfig

TRAIN_TOKENIZER, TRAINED_VOCAB_SIZE = "train", 2048
"""The tokenizer that is trained on the run's own text, and its tokens where no number is given."""


def parse_positions(text: str) -> tuple[int, int]:
    """Return the range that a text states as A:B. Raises ValueError."""
    first, end = text.split(":")
    return int(first), int(end)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(Config):
    """Everything that a run of `regard pretrain` depends on. Each field is an option of the command line."""

    command: ClassVar[str] = "pretrain"
    resumable: ClassVar[frozenset[str]] = frozenset({"micro_batch_size", "save_steps", "logging_steps", "trackers"})

    idle: ClassVar[tuple[IdleOptions, ...]] = (
        IdleOptions(("decay",), "without weight decay", applies=lambda config: not config.weight_decay),
    )

    attention: str = config_field(
        "softmax", "operation, one of `regard.attention.spec.ATTENTIONS`, with changes as in softmax+top_k=4"
    )
    positions: str = config_field("rotary", "rotary, none, sinusoidal, learned, alibi, t5 or t5-bucket-number")
    window: int | None = config_field(None, "last keys that a query sees, its own included (default: all)")
    prefix: int = config_field(
        0, "number of first tokens that all tokens see and that are no targets of the loss", minimum=0
    )
    backend: str = config_field("auto", "how attention is computed: auto, or a backend by name")
    ffn: Literal["swiglu", "relu", "gelu", "swish", "reglu", "geglu"] = config_field(
        "swiglu", "swiglu, relu, gelu, swish, reglu or geglu"
    )
    norm: Literal["pre", "post"] = config_field("pre", "pre or post")
    num_layers: int = config_field(4, "layers")
    hidden_size: int = config_field(128, "width of the hidden states")
    num_heads: int = config_field(4, "query heads")
    num_kv_heads: int | None = config_field(None, "key and value heads (default: as many as query heads)")
    intermediate_size: int = config_field(256, "width of the feed-forward layer")
    tie_word_embeddings: bool = config_field(False, "the head shares the embedding's weights")
    length: int = config_field(64, "tokens of a sequence", minimum=8)
    tokenizer: str = config_field(TRAIN_TOKENIZER, "train (on the run's text), a folder, or a hub id")
    vocab_size: int | None = config_field(
        None,
        "tokens of the model (default: the tokenizer's; 2048, or as many as the text gives, for one that is trained)",
        minimum=257,
    )
    data: tuple[str, ...] = config_field(
        ("python",), "texts, each [NAME][@WEIGHT]=WHERE or WHERE: python, a file or folder, hub:NAME", repeated=True
    )
    data_fraction: float = config_field(1.0, "share of the training text that is used", exclusive_minimum=0, maximum=1)
    random_tokens: tuple[int, int] | None = config_field(
        None,
        "A:B, positions from A to B - 1 that hold random tokens in training (default: none)",
        minimum=0,
        parser=parse_positions,
        syntax="A:B",
        metavar="A:B",
    )
    fixed_token: int | None = config_field(
        None, "position that always holds the end-of-text token (default: none)", minimum=0
    )
    max_steps: int = config_field(2000, "updates")
    batch_size: int = config_field(16, "sequences per update")
    micro_batch_size: int | None = config_field(None, "sequences per forward pass (default: all)")
    learning_rate: float = config_field(1e-2, "peak of the learning rate", exclusive_minimum=0)
    lr_scheduler_type: Literal["constant", "cosine"] = config_field("constant", "constant or cosine, after the warm-up")
    warmup_steps: int = config_field(100, "steps of linear warm-up", minimum=0)
    weight_decay: float = config_field(0.1, "weight decay of AdamW", minimum=0)
    decay: Literal["all", "matrices"] = config_field(
        "all", "what decays: all parameters (as in the paper), or matrices"
    )
    max_grad_norm: float = config_field(1.0, "largest norm of the gradient", exclusive_minimum=0)
    precision: Literal["float32", "bfloat16"] = config_field("float32", "float32, or bfloat16 (autocast)")
    compile: bool = config_field(False, "compile the model")
    seed: int = config_field(0, "seed of weights, batches and everything else", minimum=0, maximum=MAX_SEED)
    eval_steps: int = config_field(100, "steps between two measurements of sinks and validation loss")
    sink_samples: int = config_field(100, "held-out sequences on which sinks are measured")
    sink_length: int = config_field(64, "tokens of these sequences (at most --length)", minimum=8)
    epsilon: float = config_field(0.3, "threshold of the sink rate", exclusive_minimum=0, maximum=0.999)
    eval_samples: int = config_field(200, "held-out sequences per domain (source of text) for the validation loss")
    save_steps: int | None = config_field(500, "steps between two checkpoints")
    logging_steps: int = config_field(10, "steps between two rows of the history")
    trackers: tuple[str, ...] = config_field(
        (), "trackers of Accelerate that get the numbers too: tensorboard, wandb, …", repeated=True
    )

    def check(self) -> None:
        spec = self.spec
        heads, kv_heads, length = self.num_heads, self.num_kv_heads, self.length
        width, is_rotary = self.hidden_size // heads, spec.positions == "rotary"
        warmup, steps, fixed = self.warmup_steps, self.max_steps, self.fixed_token or 0
        first, end = self.random_tokens or (0, 1)
        for name, is_wrong, expected, value in (
            ("num-heads", self.hidden_size % heads, f"a divisor of the hidden size {self.hidden_size}", heads),
            ("num-kv-heads", heads % (kv_heads or heads), f"a divisor of the {heads} heads", kv_heads),
            (
                "num-heads" if kv_heads is None else "num-kv-heads",
                spec.differential and (kv_heads or heads) % 2,
                "an even number for differential attention, which joins heads in pairs",
                kv_heads or heads,
            ),
            ("num-heads", is_rotary and width % 2, "an even width of each for rotary positions", width),
            ("warmup-steps", warmup > steps, f"at most the {steps} steps", warmup),
            ("data", not self.data, "at least one source of text", "none"),
            (
                "window",
                (spec.window or 0) >= length,
                f"fewer tokens than the length {length}, to hide some",
                spec.window,
            ),
            ("prefix", spec.prefix >= length, f"fewer tokens than the length {length}", spec.prefix),
            ("fixed-token", fixed >= length, f"a position below the length {length}", fixed),
            ("random-tokens", not 0 <= first < end <= length, f"A:B with 0 ≤ A < B ≤ {length}", f"{first}:{end}"),
        ):
            if is_wrong:
                raise UserError(f"{name}: expected {expected}, got {value}")
        object.__setattr__(self, "sink_length", min(self.sink_length, length))
        if not self._count_targets():
            raise UserError(f"random-tokens: expected tokens of the text to predict, none of {length} is left")

    def _count_targets(self) -> int:
        """Return how many positions of a sequence are targets in training, without a list of them: it may be long."""
        start, (first, end), fixed = max(1, self.spec.prefix), self.random_tokens or (0, 0), self.fixed_token
        count = self.length - start - max(0, end - max(first, start))
        return count - (fixed is not None and fixed >= start and not first <= fixed < end)

    def uncounted(self, *, training: bool) -> tuple[int, ...]:
        """Return the positions whose tokens are no targets: of the prefix, and what replaces tokens of the text."""
        positions = set(range(self.spec.prefix))
        if training and self.random_tokens is not None:
            positions |= set(range(*self.random_tokens))
        if self.fixed_token is not None:
            positions.add(self.fixed_token)
        return tuple(sorted(positions))

    @property
    def spec(self) -> AttentionSpec:
        """The attention with its positions, window, prefix and backend, each stated once."""
        from regard.attention.spec import ATTENTIONS, AttentionSpec, split_changes

        name, changes = split_changes(self.attention)
        check_choice("attention", name, ATTENTIONS)
        for field in ("positions", "window", "prefix", "backend"):
            value = getattr(self, field)
            if value != getattr(AttentionSpec(), field) and changes.setdefault(field, value) != value:
                raise UserError(f"{field}: expected one value, got {changes[field]} in {self.attention} and {value}")
        return ATTENTIONS[name].changed(**changes)

    def model_config(self, vocab_size: int, **tokens: Any) -> RegardConfig:
        """Return the configuration of the model; `tokens` are the ids of its special tokens by their names."""
        from regard.models import RegardConfig

        names = ("hidden_size", "intermediate_size", "ffn", "norm", "tie_word_embeddings")
        same: dict[str, Any] = {name: getattr(self, name) for name in names}
        return RegardConfig(
            vocab_size=vocab_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.length,
            attention=self.spec.to_dict(),
            **same,
            **tokens,
        )

    def training_config(self) -> TrainingConfig:
        from regard.training import TrainingConfig

        return TrainingConfig.of(self)


_PAPER: dict[str, Any] = {
    "length": 2048,
    "tokenizer": "EleutherAI/gpt-neox-20b",
    "vocab_size": 50_432,
    "data": ("hub:monology/pile-uncopyrighted",),
    "max_steps": 20_000,
    "batch_size": 512,
    "learning_rate": 4e-4,
    "precision": "bfloat16",
    "eval_steps": 1000,
    "save_steps": 1000,
}
PRESETS: dict[str, dict[str, Any]] = {
    "pico": {
        **{"hidden_size": 64, "intermediate_size": 128, "vocab_size": 1024, "length": 32, "batch_size": 32},
        **{"weight_decay": 0.5, "fixed_token": 0},
    },
    "nano": {},
    "1m": {"num_layers": 2, "hidden_size": 256, "num_heads": 8, "intermediate_size": 512, **_PAPER},
    "60m": {"num_layers": 10, "hidden_size": 768, "num_heads": 8, "intermediate_size": 1536, **_PAPER},
    "1b": {"num_layers": 22, "hidden_size": 2048, "num_heads": 16, "intermediate_size": 5632, **_PAPER},
}
"""By name, what each has other than the defaults, which are those of `nano`, of a million parameters.

`1m`, `60m` and `1b` are the models of Gu et al. 2025, with its tokenizer, context and batches. `pico`, a third of a
million parameters, is the smallest found in which a sink passes the threshold: in a minute or two on one core, with a
fixed first token, strong weight decay and short sequences.
"""


def preset_config(config: str | PretrainConfig, **changes: Any) -> PretrainConfig:
    """Return a preset by its name, or a configuration, with some fields changed. Raises UserError.

    A preset's size of the vocabulary is that of its own tokenizer: with a smaller one there would be words that never
    occur. Another tokenizer brings its own, if no size is given. A run shorter than the preset's warm-up has a tenth of
    its steps for it.
    """
    if isinstance(config, PretrainConfig):
        return config.replace(**changes)
    check_choice("preset", config, PRESETS)
    preset = PretrainConfig.from_dict(PRESETS[config])
    if changes.get("tokenizer", preset.tokenizer) != preset.tokenizer:
        changes = {"vocab_size": None, **changes}
    steps = changes.get("max_steps", preset.max_steps)
    if isinstance(steps, int) and steps < preset.warmup_steps:
        changes = {"warmup_steps": steps // 10, **changes}
    return preset.replace(**changes)
