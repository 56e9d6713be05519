"""Training behind and through a frozen encoder: hidden states kept on disk, the paper's probes, and their scores."""

from regard.training.metrics import METRICS, check_metric, score
from regard.training.probes import KINDS, MaskedProbe, ProbeKind, SequenceProbe, TokenProbe, make_probe
from regard.training.probing import ProbeSettings, batch_rows, fit_probe, predict
from regard.training.states import States, encode_states
from regard.training.through import train_through

__all__ = [
    "KINDS",
    "METRICS",
    "MaskedProbe",
    "ProbeKind",
    "ProbeSettings",
    "SequenceProbe",
    "States",
    "TokenProbe",
    "batch_rows",
    "check_metric",
    "encode_states",
    "fit_probe",
    "make_probe",
    "predict",
    "score",
    "train_through",
]
