"""The configuration of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from regard.errors import UserError
from regard.runs.config import MAX_SEED, Config, config_field
from regard.runs.idle_options import IdleOptions

if TYPE_CHECKING:
    from regard.training import TrainingConfig

Stage = Literal["layers", "model"]
AVERAGE, TRAINED_AVERAGE = "average", "average-init"
"""The attentions that stand for constants: the averages over rows of the text, which stay as they are, or learn."""
DEFAULT_LENGTH = 128
DEFAULT_WINDOW = 64
DEFAULT_PREFIX = 4


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Config):
    """Everything that a run of `regard convert` depends on beside the model. Each field is an option."""

    command: ClassVar[str] = "convert"
    resumable: ClassVar[frozenset[str]] = frozenset({"micro_batch_size", "save_steps", "logging_steps"})

    idle: ClassVar[tuple[IdleOptions, ...]] = (
        IdleOptions(
            ("average_samples",),
            "no averages stand for the attention",
            applies=lambda config: config.attention not in (AVERAGE, TRAINED_AVERAGE),
        ),
        IdleOptions(("layer_learning_rate",), "there is no first stage", applies=lambda config: not config.layer_steps),
        IdleOptions(
            ("model_learning_rate", "trained"),
            "there is no second stage",
            applies=lambda config: not config.model_steps,
        ),
        IdleOptions(
            ("weight_decay", "max_grad_norm"),
            "nothing is trained",
            applies=lambda config: not config.layer_steps and not config.model_steps,
        ),
    )

    attention: str | None = config_field(
        None,
        "average, average-init (these are trained too), or an operation of `regard replace --attention`: "
        "sigmoid, linear, … "
        "(default: softmax+window=64+prefix=4, or a window of half the length if that is shorter)",
    )
    layers: tuple[int, ...] | None = config_field(
        None, "layers that get the attention, counted from 0, such as 0,2,5 (default: all)", minimum=0
    )
    average_samples: int = config_field(
        200, "sequences of text over which attention is averaged, at most all, for average and average-init"
    )
    text: tuple[str, ...] = config_field(
        ("python",), "texts, each [NAME][@WEIGHT]=WHERE or WHERE: python, a file or folder, hub:NAME", repeated=True
    )
    length: int | None = config_field(
        None, "tokens of a sequence (default: 128, or fewer if the model takes no more)", minimum=8
    )
    layer_steps: int = config_field(200, "updates of the first stage, layer by layer (0: none)", minimum=0)
    model_steps: int = config_field(200, "updates of the second stage, end to end (0: none)", minimum=0)
    layer_learning_rate: float = config_field(3e-3, "peak learning rate of the first stage", exclusive_minimum=0)
    model_learning_rate: float = config_field(3e-4, "peak learning rate of the second stage", exclusive_minimum=0)
    trained: Literal["all", "attention"] = config_field(
        "all", "weights that the second stage trains: all, or attention (those of the attention modules)"
    )
    batch_size: int = config_field(8, "sequences per update")
    micro_batch_size: int | None = config_field(None, "sequences per forward pass (default: all)")
    weight_decay: float = config_field(0.0, "weight decay of AdamW", minimum=0)
    max_grad_norm: float = config_field(1.0, "largest norm of the gradient", exclusive_minimum=0)
    precision: Literal["float32", "bfloat16"] = config_field("float32", "float32, or bfloat16 (autocast)")
    seed: int = config_field(0, "seed of batches and dropout", minimum=0, maximum=MAX_SEED)
    eval_steps: int = config_field(50, "steps between two measurements of the validation loss")
    eval_samples: int = config_field(
        100, "held-out sequences per domain (source of text) for the validation loss", minimum=2
    )
    save_steps: int | None = config_field(100, "steps between two checkpoints")
    logging_steps: int = config_field(10, "steps between two rows of the history")

    def check(self) -> None:
        if not self.text:
            raise UserError("text: expected at least one source, got none")

    def check_attention(self) -> None:
        """Raise UserError if the attention is none that a trained model can be given."""
        from regard.hooks.operation import parse_attention

        if self.attention not in (None, AVERAGE, TRAINED_AVERAGE):
            parse_attention(self.attention, AVERAGE, TRAINED_AVERAGE)

    def for_model(self, limit: int | None) -> ConvertConfig:
        """Return the configuration with a length and an attention, for a model of at most `limit` tokens.

        Raises:
            UserError: The attention has a window that hides nothing in sequences of this length.
        """
        from regard.hooks.operation import parse_attention

        length = self.length or min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
        window = max(1, min(DEFAULT_WINDOW, length // 2, length - DEFAULT_PREFIX - 1))
        attention = f"softmax+window={window}+prefix={DEFAULT_PREFIX}" if self.attention is None else self.attention
        averages = AVERAGE, TRAINED_AVERAGE
        spec = None if attention in averages else parse_attention(attention, *averages)
        if spec is not None and spec.window is not None and spec.window + spec.prefix >= length:
            longer = "" if length == limit else ", or a larger length"
            first = f" and {spec.prefix} first tokens hide" if spec.prefix else " hides"
            raise UserError(
                f"attention: a window of {spec.window}{first} nothing in sequences of {length} tokens; expected a "
                f"smaller window{longer}"
            )
        return self.replace(length=length, attention=attention)

    @property
    def chosen_attention(self) -> str:
        """What replaces the model's own attention."""
        assert self.attention is not None, "filled in for the model"
        return self.attention

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence."""
        assert self.length is not None, "filled in for the model"
        return self.length

    def training_config(self, stage: Stage) -> TrainingConfig:
        """Return the plan of a stage: a cosine behind a warm-up of a tenth of it."""
        from regard.training import TrainingConfig

        steps, rate = self.model_steps, self.model_learning_rate
        if stage == "layers":
            steps, rate = self.layer_steps, self.layer_learning_rate
        return TrainingConfig.of(self, max_steps=steps, learning_rate=rate, warmup_steps=steps // 10)
