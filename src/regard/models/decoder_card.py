"""What the card of a saved decoder says: with and without Regard."""

from typing import Any

from regard.models.configuration import RegardConfig, llama_differences
from regard.models.standalone import CODE, find_unsupported
from regard.runs.model_card import INSTALL, ModelCard

_WITH_REGARD = f"With {INSTALL} and `import regard.models` use `AutoModelForCausalLM`"


def has_code(config: RegardConfig) -> bool:
    """Return whether code stands beside the weights: not where Llama reads them, nor where it cannot compute them."""
    return bool(llama_differences(config)) and not find_unsupported(config.attention)


def describe_decoder(config: RegardConfig) -> ModelCard:
    """Return the card of a decoder as far as its configuration tells."""
    spec = config.spec
    changes = [f"`{name.removeprefix('attention ')}={value}`" for name, (value, _) in llama_differences(config).items()]
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    shape = f"{layers} layers of {heads} heads, width {config.hidden_size}, vocabulary of {config.vocab_size:,} tokens"
    what = f"It differs from Llama by {', '.join(changes)}." if changes else "It computes what Llama computes."
    about = f"A causal language model that Regard made: {shape}. {what}"
    title = f"Decoder with {spec.weighting} attention" if changes else "Decoder, a Llama in function"
    license = "Regard sets none for these weights. The licenses of the texts behind them are not known to it."
    return ModelCard(title=title, about=(about,), license=license, **_loading(config))


def _loading(config: RegardConfig) -> dict[str, Any]:
    """Return how a decoder is loaded, and what that needs."""
    if not llama_differences(config):
        needs = (
            "The weights are those of a Llama. Transformers warns that the model's type is `regard`, and computes the "
            f"same; `model.save_pretrained` then writes a plain Llama. {_WITH_REGARD}; `to_llama` of "
            "`regard.models.llama` exports it."
        )
        load = ('model = LlamaForCausalLM.from_pretrained("FOLDER")',)
        return {"classes": ("LlamaForCausalLM",), "load": load, "needs": needs}
    loading: dict[str, Any] = {"classes": ("AutoModelForCausalLM",)}
    if unsupported := find_unsupported(config.attention):
        load = ('model = AutoModelForCausalLM.from_pretrained("FOLDER")',)
        needs = f"It needs {INSTALL} for `{', '.join(unsupported)}`."
        return loading | {"imports": ("import regard.models",), "load": load, "needs": needs}
    load = ('model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)',)
    needs = (
        f"This runs `{CODE.name}` of the folder, plain PyTorch in one file, which you may read first. It has matrices "
        f"of T×T numbers a head. {_WITH_REGARD} without `trust_remote_code`; it computes the same without these."
    )
    return loading | {"load": load, "needs": needs, "trusts_code": True}
