"""Which way a layer attends: whether its tokens see later ones, and whether earlier ones that they see see them."""

from torch import Tensor, nn

from regard.attention.call import AttentionCall, visible_mask


def is_causal_layer(
    module: nn.Module, call: AttentionCall, tokens: Tensor | None = None, *, embeds_tokens: bool = False
) -> bool:
    """Return whether no query of a layer sees a later key, or only within a prefix or an image. Reads the mask.

    In such a layer some token sees an earlier one that does not see it. So it is in streaming speech encoders, too,
    which work in chunks or see some frames ahead; but there the module says that it is not causal, and its stack has no
    embeddings of tokens (`embeds_tokens`): those of PaliGemma's decoder say it as well. A call of one token does not
    say it; then the module does. `tokens` is that of `is_one_sided`.
    """
    if call.causal:
        return True
    declared = getattr(module, "is_causal", None)
    queries, keys = call.query.shape[2], call.key.shape[2]
    if queries == 1 or queries != keys:
        is_decoder = getattr(getattr(module, "config", None), "is_decoder", True)
        return bool(is_decoder if declared is None else declared)
    in_any = visible_mask(call).flatten(0, 1).any(0)  # the parts above and below the diagonal are copies
    if not bool(in_any.triu(1).any()):
        return bool(in_any.tril(-1).any()) or declared is not False  # else each token sees itself alone
    if declared is False and not embeds_tokens:
        return False
    if is_one_sided(call, tokens):
        return True
    visible = _visible_tokens(call, tokens)
    return declared is True and not bool((visible & visible.mT).triu(1).any())


def is_one_sided(call: AttentionCall, tokens: Tensor | None = None) -> bool:
    """Return whether some token of a self-attention sees an earlier one that does not see it.

    It is not so in a window that reaches farther ahead than back (T5Gemma 2). `tokens` (batch, token) is False at
    what is known to be padding, which may see tokens and itself.
    """
    visible = _visible_tokens(call, tokens)
    return bool((visible & ~visible.mT).tril(-1).any())


def _visible_tokens(call: AttentionCall, tokens: Tensor | None) -> Tensor:
    """Return which pairs see each other, of keys that some query sees and that are not known to be padding."""
    visible = visible_mask(call)
    seen = visible.any(-2)
    if tokens is not None and tokens.shape == (len(call.query), call.key.shape[2]):
        seen = seen & tokens[:, None].to(seen.device)
    return visible & seen[..., None, :] & seen[..., :, None]
