"""Every model type is measured as its own eager attention computes it, or refused in one line."""

import json
from pathlib import Path

import pytest

from experiments.hosts.check import EXACT, check_host
from experiments.hosts.page import make_page

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "docs/results/hosts.json").read_text(encoding="utf-8"))
HOSTS = {f"{host['kind']} {host['type']}": host for host in RESULTS["hosts"]}
SAMPLE = [
    *(f"causal {name}" for name in (
        "llama", "gpt2", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gpt_neox", "gpt_oss", "olmo2",
        "cohere2", "granite_swa", "opt", "glm4", "stablelm")),
    *(f"masked {name}" for name in (
        "bert", "roberta", "albert", "distilbert", "electra", "modernbert", "deberta-v2", "camembert")),
    *(f"encoder-decoder {name}" for name in ("t5", "bart", "marian", "mt5", "pegasus", "t5gemma2", "led")),
    *(f"vision {name}" for name in ("vit", "deit", "dinov2", "swin", "ijepa")),
    *(f"vision-language {name}" for name in ("git", "llava")),
    *(f"audio {name}" for name in ("whisper", "hubert")),
]  # fmt: skip


def assert_as_in_table(name: str) -> None:
    host = HOSTS[name]
    row = check_host(host["type"], host["class"], host["kind"] == "causal")
    assert row["state"] == host["state"], row
    if host["state"] == EXACT:
        assert row["checks"] == host["checks"]


@pytest.mark.parametrize("name", [name for name in SAMPLE if name in HOSTS])
@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_hosts(name: str) -> None:
    assert_as_in_table(name)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, host in HOSTS.items() if host["state"] != "not buildable"])
@pytest.mark.filterwarnings("ignore")
def test_all_hosts(name: str) -> None:
    assert_as_in_table(name)


def test_the_page_is_made_from_the_results() -> None:
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == make_page(RESULTS)
