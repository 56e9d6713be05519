"""A pretrained model with its tokenizer, ready to be looked at."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from regard.data.tokenizers import largest_id
from regard.errors import UserError
from regard.models import model_files, peft_adapters
from regard.models.auto_classes import (
    check_complete_model,
    check_generates_text,
    import_model_type,
    select_auto_class,
    select_head_class,
    select_language_model_class,
)
from regard.models.classifier import Classifier, ClassifierConfig, extract_encoder, mark_encoder_only
from regard.models.model_files import Loaded as Loaded
from regard.models.model_files import as_user_error, check_tokenizer_files, find_model_folder, find_weight_files
from regard.models.processors import Kind, load_readers
from regard.runs.integrity import sha256_of_file
from regard.runs.model_type import input_embeddings
from regard.runs.quiet import suppress_logging

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_DEVICES = "auto, cpu, cuda, cuda:N or mps"
# Heads that AutoModel adds on top and no attention stands behind: they may be new where the checkpoint has none.
_HEADS = ("pooler.",)


def as_loaded(model: Any, tokenizer: Any, *, to: str, call: str, merge: bool = True) -> Loaded:
    """Return a model, or what `load` returned, with its tokenizer, checked to belong together.

    `to` and `call` say in a refusal what is to be done with the model, and how the caller is to be called. The adapter
    of a `PeftModel` is merged into a copy, or left in place.
    """
    if isinstance(model, Loaded):
        loaded = model if tokenizer is None else replace(model, tokenizer=tokenizer)
    elif not isinstance(plain := peft_adapters.unwrap_peft(model, merge=merge), PreTrainedModel):
        expected = "a Hugging Face PreTrainedModel, a PeftModel over one, or its name"
        raise UserError(f"cannot {to} {type(model).__name__}: expected {expected}")
    elif tokenizer is None:
        raise UserError(f"a model needs its tokenizer: {call}")
    else:
        adapter = None if plain is model else f"{model.active_adapter} of a {type(model).__name__}"
        loaded = Loaded(plain, tokenizer, plain.config._name_or_path or type(plain).__name__, None, adapter)
    check_vocabulary(loaded.model, loaded.tokenizer, loaded.name)
    return loaded


def resolve_model(
    model: PreTrainedModel | Loaded | str | Path,
    tokenizer: Any,
    *,
    to: str,
    call: str,
    language_model: bool = False,
    merge: bool = True,
) -> Loaded:
    """Return a model with its tokenizer as `as_loaded` does; one that is named is loaded."""
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        expected = "one as AutoTokenizer loads it, or none beside the name of a model"
        raise UserError(f"tokenizer: expected {expected}; got {type(tokenizer).__name__}. The call is {call}.")
    if isinstance(model, (str, Path)):
        model = load(model, language_model=language_model)
    return as_loaded(model, tokenizer, to=to, call=call, merge=merge)


def load(
    name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    random_weights: bool = False,
    language_model: bool = False,
    adapter: str | None = None,
    images: bool = False,
    audio: bool = False,
    videos: bool = False,
    head: bool = False,
    seed: int = 0,
) -> Loaded:
    """Return a model and its tokenizer, from a folder, the hub, or the embedded default `minilm`.

    The model has no head (`AutoModel`; both stacks of an encoder–decoder), since logits would cost more memory than all
    that is measured; a model whose own code has no `AutoModel` is loaded as a causal language model. Of a classifier
    that `regard rollback` wrote it is the trained encoder, with LoRA adapters merged. Pickled weights are never read.

    Args:
        name: Folder, hub id or `minilm`; of an adapter of PEFT, which then names its base model, as well.
        dtype: "auto" is the checkpoint's on a GPU and float32 on a CPU.
        device: "auto" is the first of cuda, mps, cpu.
        trust_remote_code: Run code that comes with the model.
        attn_implementation: As in Transformers.
        random_weights: Build the architecture with new weights from `seed`.
        language_model: Load the head of a language model as well; an encoder is refused.
        adapter: Folder or hub id of an adapter of PEFT, which is merged into the weights.
        images: Load the processor of images as well, which holds the tokenizer if the model reads text.
        audio: Load that of sounds.
        videos: Load that of videos.
        head: Load the head of a language model, a masked one too, or a classifier that the checkpoint has, if any.
        seed: Seed of random weights.
    """
    torch_device, name = _device(device), str(name)
    folder, name, adapter = _find(name, adapter, code=trust_remote_code, weights=not random_weights)
    adapter_folder = None if adapter is None else peft_adapters.find_adapter_folder(adapter)
    if adapter_folder is not None and random_weights:
        raise UserError(f"adapter: expected none with random weights, got '{adapter}'")
    with suppress_logging():
        options: dict[str, Any] = {"dtype": _dtype(dtype, torch_device)}
        config = _read_config(folder, name, trust_remote_code, language_model=language_model)
        options["attn_implementation"] = attn_implementation or _attention_with_caps(config)
        files = [] if random_weights else find_weight_files(folder, name)
        kind: Kind | None = "images" if images else "audio" if audio else "videos" if videos else None
        processor, tokenizer = load_readers(folder, name, config, kind, trust_remote_code=trust_remote_code)
        auto_class = _select_class(config, adapter_folder, trust_remote_code, language_model=language_model, head=head)
        if adapter_folder is not None:
            files = [*files, adapter_folder / model_files.ADAPTER_WEIGHTS]
        with as_user_error(f"model: '{name}' cannot be built:"):
            if isinstance(config, ClassifierConfig):
                model = _load_encoder(folder, config, name, seed if random_weights else None, **options)
            elif random_weights:
                model = _make_random(auto_class, config, seed, trust_remote_code=trust_remote_code, **options)
            else:
                options["needs_head"] = adapter is None or language_model
                model = _load_trained(auto_class, folder, config, name, trust_remote_code=trust_remote_code, **options)
        if adapter is not None and adapter_folder is not None:
            merged: Any = peft_adapters.merge_adapter(model, adapter_folder, adapter)
            model = merged if language_model or head else merged.base_model
    if getattr(config, "is_encoder_decoder", False) and (folder / GENERATION_CONFIG_NAME).is_file():
        with as_user_error(f"model: the generation config of '{name}' cannot be read:"):
            model.generation_config = GenerationConfig.from_pretrained(folder)  # a model without its head has none
    if tokenizer is not None:
        check_vocabulary(model, tokenizer, name, texts=processor is None)
    model.to(torch_device)  # type: ignore[arg-type]  # its wrapper hides the signature
    if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # PyTorch has no grouped products in float64
    model.eval()
    return Loaded(model, tokenizer, name, sha256_of_file(*files) if files else None, adapter, processor)


def check_model(name: str, adapter: str | None = None, *, code: bool = False, language_model: bool = False) -> None:
    """Raise UserError for what `load` would refuse before it reads weights; of a hub id no weights are fetched."""
    folder, base, adapter = _find(name, adapter, code=code, weights=False)
    if adapter is not None:
        peft_adapters.find_adapter_folder(adapter)
    _read_config(folder, base, code, language_model=language_model)
    if base == model_files.MINILM or os.path.isdir(os.path.expanduser(base)):
        find_weight_files(folder, base)
    check_tokenizer_files(folder, base)


def _find(name: str, adapter: str | None, *, code: bool, weights: bool) -> tuple[Path, str, str | None]:
    """Return the folder and name of a model, and its adapter's name; that of an adapter is the base that it names."""
    folder = find_model_folder(name, code=code, weights=weights)
    if peft_adapters.is_adapter(folder):
        if adapter is not None:
            raise UserError(f"adapter: expected none with '{name}', which is an adapter itself; got '{adapter}'")
        name, adapter = peft_adapters.find_base_name(folder), name
        folder = find_model_folder(name, code=code, weights=weights)
    return folder, name, adapter


def _read_config(folder: Path, name: str, trust_remote_code: bool, *, language_model: bool) -> Any:
    with suppress_logging(), as_user_error(f"model: the configuration of '{name}' is not understood:", (Exception,)):
        import_model_type(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    check_complete_model(config, name)
    if language_model:
        check_generates_text(config, name)
    return config


def _attention_with_caps(config: Any) -> dict[str, str] | str | None:
    """Return "eager", by part, where scores have a soft cap, which SDPA ignores before Transformers 5.22; else None."""
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    parts = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    return {name: "eager" for name, part in parts.items() if _attention_with_caps(part)} or None


def _select_class(
    config: Any, adapter_folder: Path | None, trust_remote_code: bool, *, language_model: bool, head: bool
) -> Any:
    """Return the auto class that loads a model, with the head that an adapter has been trained for.

    The config of a classifier is told how many labels the adapter knows.
    """
    auto_class = select_language_model_class(config) if language_model else select_auto_class(config)
    auto_class = (select_head_class(config) if head else None) or auto_class
    if adapter_folder is not None:
        auto_class = peft_adapters.select_adapter_class(adapter_folder, config, auto_class)
        if auto_class in peft_adapters.CLASSIFIERS:
            options = {"trust_remote_code": trust_remote_code}
            config.num_labels = peft_adapters.count_labels(adapter_folder, config, auto_class, **options)
    return auto_class


def _make_random(auto_class: Any, config: Any, seed: int, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stored = config.dtype or torch.float32
        return auto_class.from_config(config, dtype=stored if dtype == "auto" else dtype, **options)


def _load_trained(
    auto_class: Any, folder: Path, config: Any, name: str, *, needs_head: bool = True, **options: Any
) -> PreTrainedModel:
    """Return the model with the folder's weights; raise UserError if some are missing, unless of a head to be left.

    Some types rename weights with their head alone (DeepSeek-V4): what lacks weights without it is loaded with it, and
    so is what Transformers cannot read without it (a head that torchao has quantized).
    """
    with_head = select_head_class(config) if auto_class is AutoModel else None
    try:
        model, missing, wrong = read_weights(auto_class, folder, config, needs_head, **options)
    except RuntimeError:
        if with_head is None:
            raise
        base: Any = _load_trained(with_head, folder, config, name, needs_head=False, **options).base_model
        return base
    if (missing or wrong) and with_head is not None:
        headed, *lacks = read_weights(with_head, folder, config, False, **options)
        base = headed.base_model
        if not any(lacks) and (base is headed or type(base) is type(model)):
            return base
    if missing and not wrong and set(missing) <= _head_of(model):
        problem = f"have none: {len(missing)} are missing, the first is {missing[0]}"
        raise UserError(f"model: expected a language model's head among the weights, those of '{name}' {problem}")
    if missing or wrong:
        raise UserError(f"model: the weights of '{name}' do not fit its config.json: {count_lacks(missing, wrong)}")
    return model


def read_weights(
    model_class: Any, folder: Path, config: Any, needs_head: bool, **options: Any
) -> tuple[Any, list[str], list[str]]:
    """Return the model with the folder's weights, and the names of those that are missing or of another shape."""
    # weights of another size come back in `info`, to be refused with their names
    info_options = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = model_class.from_pretrained(folder, config=config, use_safetensors=True, **info_options, **options)
    prefix = f"{model.base_model_prefix}."
    missing = sorted(key for key in info["missing_keys"] if not key.removeprefix(prefix).startswith(_HEADS))
    if not needs_head and model.base_model is not model:
        missing = [key for key in missing if key.startswith(prefix)]
    return model, missing, sorted(str(key[0]) for key in info["mismatched_keys"])


def count_lacks(missing: list[str], wrong: list[str]) -> str:
    """Say how many weights `read_weights` found missing, and how many of another shape; at least one is."""
    return f"{len(missing)} are missing and {len(wrong)} have another shape, the first is {(missing + wrong)[0]}"


def _head_of(model: Any) -> set[str]:
    """Return the names of the weights of a language model's head, where it stands beside the model below."""
    if model.get_output_embeddings() is None or model.base_model is model:
        return set()
    return {key for key in model.state_dict() if not key.startswith(f"{model.base_model_prefix}.")}


def _load_encoder(
    folder: Path, config: ClassifierConfig, name: str, seed: int | None, *, dtype: Any, attn_implementation: str | None
) -> PreTrainedModel:
    """Return the encoder of a classifier that `regard rollback` has written, or with a seed a random one like it."""
    if attn_implementation is not None:
        config.base["attn_implementation"] = attn_implementation
    if dtype != "auto":
        config.base["dtype"] = dtype
    if seed is None:
        classifier: Any = _load_trained(Classifier, folder, config, name, dtype=dtype)
        model: PreTrainedModel = classifier.take_encoder()
    else:
        model = mark_encoder_only(extract_encoder(_make_random(AutoModel, config.base_config(), seed, dtype)))
    model.config._name_or_path = str(folder)
    return model


def _device(device: str) -> torch.device:
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        requested = torch.device(device)
    except RuntimeError:
        raise UserError(f"device: expected {_DEVICES}, got '{device}'") from None
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    counts = {"cpu": 1, "cuda": num_cuda, "mps": int(torch.backends.mps.is_available())}
    if (requested.index or 0) >= counts.get(requested.type, 0):
        present = ", ".join(f"{kind} ({count})" for kind, count in counts.items() if count)
        raise UserError(f"device: '{device}' is not on this machine; there is {present}; expected {_DEVICES}")
    return requested


def _dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype of this name; 'auto' is left to the checkpoint on a GPU and is float32 on a CPU."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise UserError(f"dtype: expected auto, {', '.join(DTYPES)}, got '{dtype}'")
    if dtype == "float64" and device.type == "mps":
        raise UserError("dtype: float64 is not available on mps; expected float32, float16 or bfloat16")
    return DTYPES[dtype]


def check_vocabulary(model: PreTrainedModel, tokenizer: Any, name: str, *, texts: bool = True) -> None:
    """Check that the model reads texts (unless it need not) and has an embedding for each id of the tokenizer."""
    if model.main_input_name != "input_ids" and texts:
        raise UserError(f"model: '{name}' is none for texts: {type(model).__name__} reads {model.main_input_name}")
    rows = getattr(input_embeddings(model), "num_embeddings", None)
    if rows is None:  # of two towers, or of patches, in a model that reads images alone
        return
    highest = largest_id(tokenizer)
    if not 0 <= highest < rows:
        sizes = f"its ids go up to {highest}, the model's embedding has {rows} rows"
        raise UserError(f"model: the tokenizer of '{name}' does not belong to it: {sizes}")
