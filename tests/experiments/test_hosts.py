"""The table of hosts: its page is made from its rows, no row is silent, and rows come out as they are written."""

import warnings
from typing import Any

import pytest
import transformers

from experiments.hosts.catalog import find_hosts
from experiments.hosts.check import check_host
from experiments.hosts.page import make_files
from experiments.hosts.run import check_guarded, load_rows, load_version

ROWS = load_rows()
pytestmark = pytest.mark.skipif(
    load_version() != transformers.__version__, reason="the rows are of another version of Transformers"
)
SAMPLE = (
    "causal/llama", "causal/gpt2", "causal/gpt_oss", "causal/qwen3", "causal/gemma3n_text", "causal/deepseek_v3",
    "causal/longcat_flash", "causal/gemma3_text", "causal/phi3", "causal/opt", "causal/bloom", "causal/mistral",
    "causal/granite_swa", "causal/gptj", "causal/cohere2", "causal/gpt_neox", "causal/falcon", "causal/mamba",
    "causal/xglm", "causal/deepseek_v4", "masked/bert", "masked/modernbert", "masked/distilbert", "masked/electra",
    "masked/deberta-v2", "masked/roberta", "masked/xlm-roberta", "encoder-decoder/bart", "encoder-decoder/t5",
    "encoder-decoder/whisper", "encoder-decoder/mbart", "encoder-decoder/t5gemma2", "vision-language/llava",
    "vision/vit", "vision/dinov2", "vision/beit", "audio/wav2vec2", "audio/hubert", "vision/vit_mae",
    "other/sam3_vit_model",
)  # fmt: skip


def same(row: dict[str, Any], stored: dict[str, Any]) -> bool:
    return all(row.get(name) == stored.get(name) for name in ("state", "weights", "checks"))


def test_the_page_is_made_from_the_rows() -> None:
    assert all(path.read_text(encoding="utf-8") == text for path, text in make_files(list(ROWS.values())).items())


def test_every_host_has_a_row() -> None:
    assert ROWS.keys() == find_hosts().keys()


@pytest.mark.sample(2)
@pytest.mark.parametrize("key", SAMPLE)
def test_a_host_comes_out_as_its_row_says(key: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = check_host(find_hosts()[key])
    assert same(row, ROWS[key]), row


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", [key for key in ROWS if key not in SAMPLE])
def test_every_other_host_comes_out_as_its_row_says(key: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = check_guarded(find_hosts()[key])
    assert same(row, ROWS[key]), row
