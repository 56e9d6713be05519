"""The description of a decoder: its sizes, its attention by names, and what stands around the attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import gelu, relu, silu
from transformers import PreTrainedConfig

from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.errors import UserError, check_choice

if TYPE_CHECKING:
    pass

NORMS = ("pre", "post")


class RegardConfig(PreTrainedConfig):
    """A decoder in the manner of Llama, of which every part that Gu et al. 2025 vary is a choice.

    `attention` is an `AttentionSpec`, its choices as a dictionary, or a name out of `ATTENTIONS`; it is kept as the
    dictionary of all choices. `ffn`: a name out of `FEED_FORWARDS`. `norm`: `pre`, x + f(LN(x)) with a last norm, or
    `post`, LN(x + f(x)) without one. Rotary positions may go beyond `max_position_embeddings`, tables may not.

    Raises UserError where a choice is unknown or sizes do not fit.
    """

    model_type = "regard"
    keys_to_ignore_at_inference = ("past_key_values",)

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
        rope_theta: float = 10_000.0,
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
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.ffn = ffn
        self.norm = norm
        self.attention = _spec(attention).to_dict()
        self.use_cache = use_cache
        self._check(head_dim is None)
        tokens = {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        super().__init__(**others | tokens | {"tie_word_embeddings": tie_word_embeddings})

    @property
    def spec(self) -> AttentionSpec:
        """The attention by its choices."""
        return _spec(self.attention)

    def _check(self, divided: bool) -> None:
        for name, known in (("ffn", tuple(FEED_FORWARDS)), ("norm", NORMS)):
            check_choice(name, getattr(self, name), known)
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if divided and self.hidden_size % heads:
            raise UserError(f"hidden_size: expected a multiple of the {heads} heads, got {self.hidden_size}")
        if heads % groups:
            raise UserError(f"num_key_value_heads: expected a divisor of the {heads} heads, got {groups}")
        if self.spec.positions == "rotary" and self.head_dim % 2:
            raise UserError(f"head_dim: expected an even number for rotary positions, got {self.head_dim}")


def _spec(attention: AttentionSpec | Mapping[str, Any] | str) -> AttentionSpec:
    """The choices behind a name, a dictionary of them, or themselves."""
    if isinstance(attention, AttentionSpec):
        return attention
    if isinstance(attention, str):
        check_choice("attention", attention, ATTENTIONS)
        return ATTENTIONS[attention]
    known = AttentionSpec.__dataclass_fields__
    if unknown := [name for name in attention if name not in known]:
        raise UserError(f"attention: expected choices out of {', '.join(known)}, got {', '.join(map(str, unknown))}")
    return AttentionSpec(**attention)


FEED_FORWARDS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "swiglu": (silu, True),
    "reglu": (relu, True),
    "geglu": (gelu, True),
    "swish": (silu, False),
    "relu": (relu, False),
    "gelu": (gelu, False),
}
"""An activation, and whether its result gates a second projection."""
