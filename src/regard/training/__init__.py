"""Training: the loop for whole models, and probes behind and through a frozen encoder, with their scores."""

from regard.training.checkpoint import full_weights
from regard.training.loop import Monitor, TrainResult, train
from regard.training.metrics import METRICS, check_metric, score
from regard.training.plan import TrainingConfig, learning_rate
from regard.training.probes import KINDS, MaskedProbe, ProbeKind, SequenceProbe, TokenProbe, make_probe
from regard.training.probing import ProbeConfig, batch_rows, fit_probe, predict, train_through_encoder
from regard.training.states import States, encode_states

__all__ = [
    "KINDS",
    "METRICS",
    "MaskedProbe",
    "Monitor",
    "ProbeConfig",
    "ProbeKind",
    "SequenceProbe",
    "States",
    "TokenProbe",
    "TrainResult",
    "TrainingConfig",
    "batch_rows",
    "check_metric",
    "encode_states",
    "fit_probe",
    "full_weights",
    "learning_rate",
    "make_probe",
    "predict",
    "score",
    "train",
    "train_through_encoder",
]
