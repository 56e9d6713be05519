"""The hosts: one class for each model type of Transformers, in kinds."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers.models.auto import modeling_auto

MAPPINGS = {
    "causal": ("CAUSAL_LM",),
    "masked": ("MASKED_LM",),
    "encoder-decoder": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "vision-language": ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"),
    "vision": ("IMAGE", "IMAGE_CLASSIFICATION", "BACKBONE"),
    "audio": ("AUDIO_CLASSIFICATION", "CTC"),
}
"""Mappings of `AutoModelFor…` classes by kind. A type that is in several kinds is a host in each of the first three."""
KINDS = (*MAPPINGS, "other")


@dataclass(frozen=True)
class Host:
    """One model class of Transformers, as the host of one kind."""

    kind: str
    model_type: str
    class_name: str

    @property
    def key(self) -> str:
        """Kind and type."""
        return f"{self.kind}/{self.model_type}"


def find_hosts() -> dict[str, Host]:
    """Return all hosts by key. Types without a head of one of the kinds are hosts by their base model."""
    hosts: dict[str, Host] = {}
    types: set[str] = set()
    for kind, names in MAPPINGS.items():
        for name in names:
            mapping = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")
            for model_type, classes in mapping.items():
                host = Host(kind, model_type, _first(classes))
                if host.key not in hosts and (
                    kind in ("causal", "masked", "encoder-decoder") or model_type not in types
                ):
                    hosts[host.key] = host
        types |= {host.model_type for host in hosts.values()}
    for model_type, classes in modeling_auto.MODEL_MAPPING_NAMES.items():
        if model_type not in types:
            host = Host("other", model_type, _first(classes))
            hosts[host.key] = host
    return hosts


def _first(classes: str | Sequence[str]) -> str:
    return classes if isinstance(classes, str) else classes[0]
