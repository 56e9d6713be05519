"""The methods of continual learning by name."""

from regard.continual.method import Method, suggest_name
from regard.continual.methods.baselines import Finetune, Joint, PreScale, Probe, ProbeFinetune, Separate
from regard.continual.methods.ctr import Ctr
from regard.continual.methods.epi import Epi
from regard.continual.methods.gainlora import GainLora
from regard.continual.methods.idbr import Idbr
from regard.continual.methods.inflora import InfLora
from regard.continual.methods.lfpt5 import Lfpt5
from regard.continual.methods.lora import IncrementalLora, Migu, NLora, OLora, ReplayLora, SequentialLora, Slao
from regard.continual.methods.mbpa import MbPA
from regard.continual.methods.merges import MergeDare, MergeLinear, MergeTies
from regard.continual.methods.osf import Osf
from regard.continual.methods.prompts import L2p, ProgPrompt
from regard.continual.methods.regularized import Ewc, Lwf
from regard.continual.methods.replay import AGem, DarkExperience, Replay
from regard.continual.methods.sapt import Sapt, SaptPaper
from regard.continual.methods.sapt_task_free import SaptTaskFree
from regard.continual.methods.seekr import Seekr
from regard.continual.own_method import SEPARATOR, load_own_method
from regard.errors import UserError

METHODS: dict[str, type[Method]] = {
    "finetune": Finetune,
    "probe": Probe,
    "probe-finetune": ProbeFinetune,
    "prescale": PreScale,
    "ewc": Ewc,
    "lwf": Lwf,
    "l2p": L2p,
    "replay": Replay,
    "agem": AGem,
    "der++": DarkExperience,
    "mbpa++": MbPA,
    "idbr": Idbr,
    "ctr": Ctr,
    "sequential-lora": SequentialLora,
    "incremental-lora": IncrementalLora,
    "replay-lora": ReplayLora,
    "o-lora": OLora,
    "n-lora": NLora,
    "inflora": InfLora,
    "migu": Migu,
    "slao": Slao,
    "merge-linear": MergeLinear,
    "merge-ties": MergeTies,
    "merge-dare": MergeDare,
    "gainlora": GainLora,
    "seekr": Seekr,
    "osf": Osf,
    "progprompt": ProgPrompt,
    "epi": Epi,
    "lfpt5": Lfpt5,
    "sapt": Sapt,
    "sapt-paper": SaptPaper,
    "sapt-task-free": SaptTaskFree,
    "separate": Separate,
    "joint": Joint,
}


def method_named(name: str) -> type[Method]:
    """Return the method of that name, or of one's own as "method.py:Mine". Raises UserError."""
    if SEPARATOR in name:
        return load_own_method(name)
    if name not in METHODS:
        if near := suggest_name(name, METHODS):
            raise UserError(f"method: there is no {name!r}{near} `regard learn --help` names all")
        raise UserError(f"method: expected one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]
