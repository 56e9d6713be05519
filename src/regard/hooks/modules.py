"""Where in a model attention happens: stacks of layers, and the kind of a layer."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from torch import nn
from transformers import PreTrainedModel

from regard.hooks.module_tree import is_of_transformers, modules_of, named_modules_of
from regard.runs.model_type import input_embeddings, original_type

CROSS = re.compile(r"cross|encoder_attn|encdec|enc_dec|encoder_(decoder_)?attention", re.IGNORECASE)
ATTENTION = re.compile(r"att(n|ention)|mha", re.IGNORECASE)
"""In paths and classes of parts that attend, in modules of nobody's library."""
KEYLESS = "deformableattention"
"""In the lowered names of classes that sample points of a map, whose weights are of no keys."""
OVER_DEPTH = "attentionresidual"
"""In the lowered names of classes that weigh the states of earlier blocks, at each token alone: no token is a key."""
LAYER_COUNT_FIELDS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers")
"""Fields of a config that say how many layers a model has."""
TIME_FIRST = ("fsmt", "xlnet")
"""Types of models whose blocks pass hidden states as (token, batch, width)."""
Fused = tuple[str, str]
"""Name of a fused projection, and its order: all queries first ("parts"), or head by head ("heads")."""


@dataclass
class Stack:
    """A model within a model, whose layers follow each other: an encoder, a decoder, a vision tower.

    It is of Transformers, or calls `scaled_dot_product_attention` itself. Hidden states are between its `blocks`; one
    that is used again stands there once. `host` is the model that it is a part of, where it is none itself.
    """

    path: str
    module: nn.Module
    blocks: list[nn.Module]
    host: nn.Module | None = None
    label: str = ""

    @cached_property
    def is_own(self) -> bool:
        """Whether it is no model of Transformers, nor a part of one."""
        return not isinstance(self.host or self.module, PreTrainedModel)

    @cached_property
    def is_time_first(self) -> bool:
        """Whether hidden states between blocks are (token, batch, width)."""
        return original_type(getattr(self.host or self.module, "config", None)) in TIME_FIRST

    @cached_property
    def embeds_tokens(self) -> bool:
        """Whether it is a model of Transformers that has embeddings of tokens, which sounds and images have not."""
        host = self.host or self.module
        table = input_embeddings(host) if isinstance(host, PreTrainedModel) else None
        return table is not None and any(isinstance(module, nn.Embedding) for module in modules_of(table))


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer: where it stands, and how many heads it has.

    Attributes:
        site: `decoder`, `encoder` or `cross`, with the path of its stack if several have this role.
        layer: The number of its block in the stack.
        path: Path of the module in the stack.
        use: Index among the layers of this module in a forward: above 0 only where layers share their weights.
        groups: Key/value heads.
        causal: A query sees no later key.
        fused: Name of the one projection for queries, keys and values, if it is recognized, and its order.
        operation: Whether it computes another operation than softmax.
        open_rows: Whether weights of a query need not sum to 1: of another operation, or beside a learned logit.
        calls: Attention calls of the module to one execution: several where heads have several values.
        own_scores: The module multiplies queries and keys itself, and may use either for more.
        lends_keys: A later layer attends to its keys, too, or something else calls its projections.
    """

    site: str
    layer: int
    module: nn.Module
    path: str
    use: int
    stack: Stack
    heads: int
    groups: int
    width: int
    causal: bool
    fused: Fused | None
    operation: bool = False
    open_rows: bool = False
    calls: int = 1
    own_scores: bool = False
    lends_keys: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.site, self.layer


def find_stacks(model: nn.Module) -> list[Stack]:
    """Return the models within a model that hold layers of their own, each after those that it contains.

    Without a model of Transformers it is the whole model, if it has a list of alike blocks.
    """
    if not any(isinstance(module, PreTrainedModel) for module in modules_of(model)):
        return [Stack("", model, _find_alike_blocks(model))]
    stacks = _find_hosts(model, nn.ModuleList) or _find_hosts(model, nn.Sequential)  # the latter around models of timm
    labels = [_find_label(model, stack.path) for stack in stacks]
    for stack, label in zip(stacks, labels, strict=True):
        stack.label = label if labels.count(label) == 1 else stack.path
    return stacks


def _find_label(model: nn.Module, path: str) -> str:
    """Return the path of a stack in the model without a head, around which there may be wrappers."""
    outermost, root = next((path, part) for path, part in named_modules_of(model) if isinstance(part, PreTrainedModel))
    label = path.removeprefix(f"{outermost}.") if path != outermost else root.base_model_prefix
    return label.removeprefix(f"{root.base_model_prefix}.").removeprefix("model.")


def _find_hosts(model: nn.Module, kind: type[nn.ModuleList | nn.Sequential]) -> list[Stack]:
    """Return the models of Transformers within a model that hold their layers in this kind of list."""
    stacks: list[Stack] = []
    for path, module in named_modules_of(model):
        if isinstance(module, PreTrainedModel) and (blocks := _find_blocks(module, kind)):
            containers = [n for n, stack in enumerate(stacks) if module in set(modules_of(stack.module))]
            where = containers[0] if containers else len(stacks)
            stacks[where:where] = _split_encoder_and_decoder(path, module) or [Stack(path, module, blocks)]
    return stacks


def _split_encoder_and_decoder(path: str, module: PreTrainedModel) -> list[Stack]:
    """Return the stacks of a model whose encoder and decoder are no models themselves (FSMT); else nothing.

    The decoder attends to the encoder: others, that repeat its states, pad both by masks of their own.
    """
    if not getattr(module.config, "is_encoder_decoder", False):
        return []
    stacks = []
    for name in ("encoder", "decoder"):
        part = getattr(module, name, None)
        if (
            not isinstance(part, nn.Module)
            or isinstance(part, PreTrainedModel)
            or not (blocks := _find_blocks(part, nn.ModuleList))
        ):
            return []
        stacks.append(Stack(f"{path}.{name}" if path else name, part, blocks, host=module))
    return stacks if attends_across(stacks[1].module) else []


def locate_modules(stacks: Sequence[Stack]) -> dict[nn.Module, tuple[Stack, str]]:
    """Return the innermost stack of each module, and the module's path in it."""
    return {module: (stack, path) for stack in reversed(stacks) for path, module in named_modules_of(stack.module)}


def _find_blocks(module: nn.Module, kind: type[nn.ModuleList | nn.Sequential]) -> list[nn.Module]:
    """Return the entries of the outermost lists of layers with attention, those of the largest list first.

    Models within the module have stacks of their own.
    """
    lists: list[nn.ModuleList | nn.Sequential] = []
    pending = list(module.children())
    while pending:
        child = pending.pop(0)
        if isinstance(child, kind):
            lists.append(child)
        elif not isinstance(child, PreTrainedModel):
            pending.extend(child.children())
    with_attention = [
        [block for entry in entries for block in _split_stage(entry)] for entries in lists if _has_attention(entries)
    ]
    largest_first = sorted(with_attention, key=len, reverse=True)
    return list(dict.fromkeys(block for blocks in largest_first for block in blocks))


def _split_stage(entry: nn.Module) -> list[nn.Module]:
    """Return the blocks of a stage, which holds a list of equal blocks and no other attention; else the entry."""
    attention = {module for module in modules_of(entry) if _is_attention(module)}
    for inner in modules_of(entry):
        if not isinstance(inner, nn.ModuleList) or len({type(block) for block in inner}) != 1:
            continue
        has_attention = [any(map(_is_attention, modules_of(block)[1:])) for block in inner]
        if all(has_attention) and attention <= set(modules_of(inner)):
            return [block for nested in inner for block in _split_stage(nested)]
    return [entry]


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name and KEYLESS not in name


def _find_alike_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the longest list or sequence of blocks of one class with children; the model itself if there is none.

    Lists of blocks with attention by the names of their parts come before others, such as convolutions. Those of
    several classes count if two of their blocks have attention, as in hybrids, and no list of one class has two entries
    with it. A block that stands in its list several times is one.
    """
    lists = [list(module) for module in modules_of(model) if isinstance(module, (nn.ModuleList, nn.Sequential))]
    lists = [blocks for blocks in lists if blocks and None not in blocks]
    alike = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1 and list(blocks[0].children())]
    hybrid = [blocks for blocks in lists if len(set(filter(_attends_within, blocks))) > 1]
    with_attention = [blocks for blocks in alike if any(map(_names_attention, blocks))]
    several = [blocks for blocks in with_attention if len(blocks) > 1]
    longest = max(several or hybrid or with_attention or alike, key=len, default=[model])
    return list(dict.fromkeys(longest))


def _attends_within(block: nn.Module) -> bool:
    """Return whether a part of a block is called an attention, so that the block is a whole layer."""
    return any(ATTENTION.search(f"{path} {type(part).__name__}") for path, part in named_modules_of(block)[1:])


def _names_attention(block: nn.Module) -> bool:
    """Return whether a part of a block, or the block, is called an attention."""
    return any(ATTENTION.search(f"{path} {type(module).__name__}") for path, module in named_modules_of(block))


def _has_attention(blocks: nn.ModuleList | nn.Sequential) -> bool:
    """Return whether layers have attention by the names of their parts, and are no models themselves."""
    if any(isinstance(module, PreTrainedModel) for module in modules_of(blocks)):
        return False
    return any(
        _is_attention(module) or (path.endswith("self_attn") and KEYLESS not in type(module).__name__.lower())
        for path, module in named_modules_of(blocks)
    )


def num_blocks(stack: Stack) -> int:
    """Return how many layers a stack has at most: those it holds, or as many as its config says."""
    config = stack.module.config.get_text_config() if isinstance(stack.module, PreTrainedModel) else None
    counts = [getattr(config, name, None) for name in LAYER_COUNT_FIELDS]
    return max([len(stack.blocks), *(count for count in counts if isinstance(count, int))])


def may_loop(module: nn.Module) -> bool:
    """Return whether a forward may have more layers than there are blocks, for some are executed several times.

    Configs of Transformers say it (Dory, Inkling2 Loop); of other modules nothing is known.
    """
    if not isinstance(module, PreTrainedModel) or not (is_of_transformers(module) or _is_ours(module)):
        return True
    return any("loop" in name for name in vars(module.config.get_text_config()))


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("regard.")


def find_outside(model: nn.Module) -> list[str]:
    """Return the paths of attention modules that are not observed, as that of Kosmos-2's resampler.

    They are in no stack, or PyTorch's own in none of its blocks, as in SigLIP's pooling head.
    """
    stacks = find_stacks(model)
    located = locate_modules(stacks)
    in_blocks = {module for stack in stacks for block in stack.blocks for module in modules_of(block)}
    outside: list[str] = []
    for path, module in named_modules_of(model):  # a module before those in it
        is_inner = path.startswith(tuple(f"{outer}." for outer in outside))
        is_pooling = isinstance(module, nn.MultiheadAttention) and module not in in_blocks
        if not is_inner and (module not in located or is_pooling) and _is_attention(module):
            outside.append(path)
    return outside


def find_ranks(stack: Stack) -> dict[nn.Module, int]:
    """Return which of the layers of its block each attention module is; nothing if each block is one layer.

    Blocks have k > 1 layers (LongCat-Flash) if each holds as many self-attention modules of one class, whose
    `layer_idx` are those from 0 to the number of layers in the config, k to a block.
    """
    blocks = {block: index for index, block in enumerate(stack.blocks)}
    paths = {module: path for path, module in named_modules_of(stack.module)}
    by_class: dict[type, list[tuple[int, int, nn.Module]]] = {}
    for block, index in blocks.items():
        for module in modules_of(block)[1:]:
            number = getattr(module, "layer_idx", None)
            is_attention = _is_attention(module) or "self_attn" in paths.get(module, "")
            if isinstance(number, int) and is_attention and attention_kind(paths[module], module) == "self":
                by_class.setdefault(type(module), []).append((index, number, module))
    for entries in by_class.values():
        per_block = len(entries) // len(blocks)
        expected = [(number // per_block, number) for number in range(len(entries))] if per_block > 1 else []
        is_numbered = sorted((index, number) for index, number, _ in entries) == expected
        if is_numbered and len(entries) == num_blocks(stack):
            return {module: number % per_block for _, number, module in entries}
    return {}


def attention_kind(path: str, module: nn.Module) -> str:
    """Return `cross` if a module's name, or its `is_cross_attention`, says that it reads other tokens, else `self`."""
    own, of_class = vars(module), hasattr(type(module), "is_cross_attention")  # a module is slow to say no
    says_cross = ("is_cross_attention" in own or of_class) and getattr(module, "is_cross_attention", False) is True
    return "cross" if says_cross or _names_cross(path) else "self"


def attends_across(stack: nn.Module) -> bool:
    """Return whether a part of a stack reads other tokens than its own."""
    return any(attention_kind(path, module) == "cross" for path, module in named_modules_of(stack))


def weighs_depth(module_class: type) -> bool:
    """Return whether a module of this class weighs the states of earlier blocks, and not those of tokens (Inkling2)."""
    return OVER_DEPTH in module_class.__name__.lower()


@cache
def _names_cross(path: str) -> bool:
    return CROSS.search(path) is not None


def cross_site(site: str) -> str:
    """Return the site of the cross-attention in a stack whose self-attention has this site."""
    return "cross" + (site.removeprefix("decoder") if site.startswith("decoder") else f"@{site}")


def masks_padding(stack: nn.Module) -> bool:
    """Return whether a stack hides padding tokens although no argument says which they are, as those of T5Gemma."""
    return hasattr(sys.modules.get(type(stack).__module__), "make_default_2d_attention_mask")
