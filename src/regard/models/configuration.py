"""The configuration of our decoder: its sizes, its attention, feed-forward layers and norms."""

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import gelu, relu, silu
from transformers import PreTrainedConfig

from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.errors import UserError, check_choice
from regard.models.standalone import AUTO_MAP, write_code

NORMS = ("pre", "post")
FEED_FORWARDS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "swiglu": (silu, True),
    "reglu": (relu, True),
    "geglu": (gelu, True),
    "swish": (silu, False),
    "relu": (relu, False),
    "gelu": (gelu, False),
}
"""Activation of a feed-forward layer, and whether its result gates a second projection."""


class RegardConfig(PreTrainedConfig):
    """Configuration of a decoder like Llama, with the choices that Gu et al. 2025 compare.

    `attention` is an `AttentionSpec`, a dictionary of its fields, or a name in `ATTENTIONS`; it is stored as the
    dictionary. `ffn` is a name in `FEED_FORWARDS`. `norm` is "pre", x + f(LN(x)) with a final norm, or "post",
    LN(x + f(x)) without one. Rotary positions may exceed `max_position_embeddings`, position tables may not.

    Raises:
        UserError: A choice is unknown, or sizes do not fit.
    """

    model_type = "regard"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]  # the Trainer adds a list to it

    def __init__(
        self,
        *,
        vocab_size: int = 50_432,
        hidden_size: int = 768,
        intermediate_size: int = 1536,
        num_hidden_layers: int = 10,
        num_attention_heads: int = 8,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        max_position_embeddings: int = 2048,
        rope_theta: float | None = None,
        rms_norm_eps: float = 1e-5,
        ffn: str = "swiglu",
        norm: str = "pre",
        attention: AttentionSpec | Mapping[str, Any] | str = "softmax",
        tie_word_embeddings: bool = False,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        **others: Any,
    ) -> None:
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.rope_theta, self.rms_norm_eps = _read_rope(others, rope_theta), rms_norm_eps
        self.ffn, self.norm, self.use_cache = ffn, norm, use_cache
        self.attention = _to_spec(attention).to_dict()
        self._check_fields(head_dim is None)
        tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        super().__init__(**others | tokens | {"tie_word_embeddings": tie_word_embeddings})

    @property
    def spec(self) -> AttentionSpec:
        return _to_spec(self.attention)

    def save_pretrained(self, save_directory: str | PathLike[Any], *others: Any, **options: Any) -> None:
        """Write the configuration, and the code for readers without Regard that it names, if it names any."""
        super().save_pretrained(save_directory, *others, **options)
        if getattr(self, "auto_map", None):
            write_code(save_directory)

    def name_code(self, *, has_code: bool) -> None:
        """Let the configuration name the code beside the weights, or none."""
        if has_code:
            self.auto_map = dict(AUTO_MAP)
        else:
            vars(self).pop("auto_map", None)

    def _check_fields(self, splits_hidden_size: bool) -> None:
        for name, choices in (("ffn", tuple(FEED_FORWARDS)), ("norm", NORMS)):
            check_choice(name, getattr(self, name), choices)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if splits_hidden_size and self.hidden_size % heads:
            raise UserError(f"hidden_size: expected a multiple of the {heads} heads, got {self.hidden_size}")
        if heads % groups:
            raise UserError(f"num_key_value_heads: expected a divisor of the {heads} heads, got {groups}")
        if self.spec.differential and groups % 2:
            raise UserError(f"num_key_value_heads: expected an even number for differential attention, got {groups}")
        if self.spec.positions == "rotary" and self.head_dim % 2:
            raise UserError(f"head_dim: expected an even number for rotary positions, got {self.head_dim}")


def llama_differences(config: RegardConfig) -> dict[str, tuple[Any, Any]]:
    """Return the choices of a decoder that Llama does not have, each with Llama's; empty for a Llama in function."""
    standard = AttentionSpec(backend=config.spec.backend).to_dict()
    choices = {"ffn": (config.ffn, "swiglu"), "norm": (config.norm, "pre")}
    choices |= {f"attention {name}": (value, standard[name]) for name, value in config.attention.items()}
    return {name: (value, expected) for name, (value, expected) in choices.items() if value != expected}


def _read_rope(others: dict[str, Any], rope_theta: float | None) -> float:
    """Return the base of rotary positions, or else that which `others` has as in Transformers, and take it out there.

    Raises:
        UserError: `others` asks for what the decoder does not have: scaled rotary positions, or windows by layer.
    """
    for name in ("rope_parameters", "rope_scaling"):
        given = others.pop(name, None)
        fields = {key: value for key, value in (given or {}).items() if value is not None}
        theta = fields.pop("rope_theta", None)
        rope_theta = theta if rope_theta is None else rope_theta
        if any(value != _PLAIN_ROPE.get(key) for key, value in fields.items()):
            raise UserError(f"{name}: expected rope_type 'default' with rope_theta alone, got {given}")
    window, types = (others.pop(name, None) for name in ("sliding_window", "layer_types"))
    if window is not None or any(kind != "full_attention" for kind in types or ()):
        name = "layer_types" if window is None else "sliding_window"
        raise UserError(f"{name}: expected none; a decoder has one window for all layers, attention={{'window': …}}")
    return 10_000.0 if rope_theta is None else float(rope_theta)


_PLAIN_ROPE = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}


def _to_spec(attention: AttentionSpec | Mapping[str, Any] | str) -> AttentionSpec:
    if isinstance(attention, AttentionSpec):
        return attention
    if isinstance(attention, str):
        check_choice("attention", attention, ATTENTIONS)
        return ATTENTIONS[attention]
    fields = AttentionSpec.__dataclass_fields__
    if unknown := [name for name in attention if name not in fields]:
        raise UserError(f"attention: expected choices out of {', '.join(fields)}, got {', '.join(map(str, unknown))}")
    return AttentionSpec(**attention)
