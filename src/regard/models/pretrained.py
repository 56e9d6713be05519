"""A pretrained model with its tokenizer, ready to be looked at."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel

from regard.errors import UserError
from regard.models.architectures import (
    check_complete_model,
    check_generates_text,
    select_auto_class,
    select_language_model_class,
)
from regard.models.classifier import Classifier, ClassifierConfig, extract_encoder, mark_encoder_only
from regard.models.loaded import Loaded as Loaded
from regard.models.model_files import (
    as_user_error,
    check_tokenizer_files,
    find_model_folder,
    find_weight_files,
    hash_files,
)
from regard.runs.quiet import suppress_logging

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_DEVICES = "auto, cpu, cuda, cuda:N or mps"
# Heads that AutoModel adds on top and no attention stands behind: they may be new where the checkpoint has none.
_HEADS = ("pooler.",)


def as_loaded(model: Any, tokenizer: Any, *, to: str, call: str) -> Loaded:
    """Return a model that the user holds, with its tokenizer, checked to belong together.

    `model` is what `load` gave, or a model; a `tokenizer` beside the former takes the place of its own. `to` and `call`
    say in a refusal what was to be done with it, and how it is asked for. Raises UserError.
    """
    if isinstance(model, Loaded):
        found = model if tokenizer is None else replace(model, tokenizer=tokenizer)
    elif not isinstance(model, PreTrainedModel):
        raise UserError(f"cannot {to} {type(model).__name__}: expected a Hugging Face PreTrainedModel, or its name")
    elif tokenizer is None:
        raise UserError(f"a model needs its tokenizer: {call}")
    else:
        found = Loaded(model, tokenizer, model.config._name_or_path or type(model).__name__, None)
    check_vocabulary(found.model, found.tokenizer, found.name)
    return found


def load(
    name: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    random_weights: bool = False,
    language_model: bool = False,
    seed: int = 0,
) -> Loaded:
    """Return a model and its tokenizer, from a folder, the hub, or the embedded default `minilm`.

    The model is the one without a head (`AutoModel`; both stacks of an encoder–decoder): every attention is in it, and
    logits over a vocabulary would cost more memory than all that is measured. A model whose own code offers no
    `AutoModel` is loaded as a causal language model. If `language_model` is asked for, every model is loaded with the
    head of one: an encoder–decoder as a whole, all others as causal; an encoder is refused.

    Of a classifier that `regard rollback` has written it is the encoder, as it has been learnt: low-rank adapters are
    added to its weights, and that of an encoder–decoder is a model of its own.

    `dtype` 'auto' is the checkpoint's on a GPU and float32 on a CPU. `device` 'auto' is the first of cuda, mps, cpu.
    `random_weights` builds the architecture with fresh weights drawn from `seed`; the caller's random state is kept.

    Raises UserError for a model that cannot be found, read in full, or fitted with its tokenizer, for what `regard
    rollback` has written of a network with weights beside its model, and for a dtype or device that is not there.
    Pickled weights are never read.
    """
    place = _device(device)
    numbers = _dtype(dtype, place)
    folder = find_model_folder(name, code=trust_remote_code, weights=not random_weights)
    with suppress_logging():
        options = {"trust_remote_code": trust_remote_code, "attn_implementation": attn_implementation}
        with as_user_error(f"model: the configuration of '{name}' is not understood:"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        check_complete_model(config, name)
        if language_model:
            check_generates_text(config, name)
        files = [] if random_weights else find_weight_files(folder, name)
        check_tokenizer_files(folder, name)
        with as_user_error(f"model: the tokenizer of '{name}' cannot be read:"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        kind = select_language_model_class(config) if language_model else select_auto_class(config)
        with as_user_error(f"model: '{name}' cannot be built:"):
            if isinstance(config, ClassifierConfig):
                model = _encoder(folder, config, numbers, name, attn_implementation, seed if random_weights else None)
            elif random_weights:
                model = _random(kind, config, numbers, seed, options)
            else:
                model = _trained(kind, folder, config, numbers, name, options)
    check_vocabulary(model, tokenizer, name)
    model.to(place)  # type: ignore[arg-type]  # its wrapper hides the signature
    model.eval()
    return Loaded(model, tokenizer, name, hash_files(files) if files else None)


def _random(kind: Any, config: Any, numbers: torch.dtype | str, seed: int, options: dict[str, Any]) -> PreTrainedModel:
    """Return a model of this configuration with weights drawn from `seed`."""
    stored = config.dtype or torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind.from_config(config, dtype=stored if numbers == "auto" else numbers, **options)
    return model


def _trained(
    kind: Any, folder: Path, config: Any, numbers: torch.dtype | str, name: str, options: dict[str, Any]
) -> PreTrainedModel:
    """Return the model with the folder's weights, every one of which was found."""
    model, found = kind.from_pretrained(
        folder,
        config=config,
        dtype=numbers,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # so that they come back in `found`, to be refused with their names
        output_loading_info=True,
        **options,
    )
    missing = sorted(key for key in found["missing_keys"] if not key.startswith(_HEADS))
    wrong = sorted(str(key[0]) for key in found["mismatched_keys"])
    if missing and not wrong and set(missing) <= _head_of(model):
        raise UserError(
            f"model: expected a language model's head among the weights, those of '{name}' have none: {len(missing)} "
            f"are missing, the first is {missing[0]}"
        )
    if missing or wrong:
        key = (missing + wrong)[0]
        raise UserError(
            f"model: the weights of '{name}' do not fit its config.json: {len(missing)} are missing and {len(wrong)} "
            f"have another shape, the first is {key}"
        )
    return model


def _head_of(model: Any) -> set[str]:
    """Return the names of the weights of a language model's head, where it stands beside the model below."""
    if model.get_output_embeddings() is None or model.base_model is model:
        return set()
    return {key for key in model.state_dict() if not key.startswith(f"{model.base_model_prefix}.")}


def _encoder(
    folder: Path,
    config: ClassifierConfig,
    numbers: torch.dtype | str,
    name: str,
    attn_implementation: str | None,
    seed: int | None,
) -> PreTrainedModel:
    """Return the encoder of a classifier that `regard rollback` has written.

    With a seed one like it, with random weights.
    """
    if attn_implementation is not None:
        config.base["attn_implementation"] = attn_implementation
    if numbers != "auto":
        config.base["dtype"] = numbers
    if seed is None:
        classifier: Any = _trained(Classifier, folder, config, numbers, name, {})
        model: PreTrainedModel = classifier.take_encoder()
    else:
        model = mark_encoder_only(extract_encoder(_random(AutoModel, config.base_config(), numbers, seed, {})))
    model.config._name_or_path = str(folder)
    return model


def _device(device: str) -> torch.device:
    """Return the device of this name, checked to be there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise UserError(f"device: expected {_DEVICES}, got '{device}'") from None
    there = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if (place.index or 0) >= there.get(place.type, 0):
        present = ", ".join(f"{kind} ({count})" for kind, count in there.items() if count)
        raise UserError(f"device: '{device}' is not on this machine; there is {present}; expected {_DEVICES}")
    return place


def _dtype(dtype: str, place: torch.device) -> torch.dtype | str:
    """Return the dtype of this name; 'auto' is left to the checkpoint on a GPU and is float32 on a CPU."""
    if dtype == "auto":
        return torch.float32 if place.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise UserError(f"dtype: expected auto, {', '.join(DTYPES)}, got '{dtype}'")
    if dtype == "float64" and place.type == "mps":
        raise UserError("dtype: float64 is not available on mps; expected float32, float16 or bfloat16")
    return DTYPES[dtype]


def check_vocabulary(model: PreTrainedModel, tokenizer: Any, name: str) -> None:
    """Check that the model reads texts and has a row in its embedding for each id of the tokenizer."""
    if model.main_input_name != "input_ids":
        raise UserError(f"model: '{name}' is none for texts: {type(model).__name__} reads {model.main_input_name}")
    table: Any = model.get_input_embeddings()
    rows = table.num_embeddings
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if not 0 <= highest < rows:
        raise UserError(
            f"model: the tokenizer of '{name}' does not belong to it: its ids go up to {highest}, "
            f"the model's embedding has {rows} rows"
        )
