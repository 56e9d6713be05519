"""Model cards: what they say of loading, of figures, of the base, and whose file they are."""

from pathlib import Path

import pytest

from regard.runs.model_card import CARD, MARK, ModelCard, public_name

CARD_OF = ModelCard(
    **{"title": "Half", "about": ("First.", "Second."), "load": ("model = load()",), "needs": "It needs more."},
    **{"license": "Not known.", "classes": ("LlamaForCausalLM",), "imports": ("import regard",)},
)


def test_a_card_in_full() -> None:
    changes = {"base": "org/name", "measured": {"loss": 1.23456, "sinks": None}, "measured_on": "On ten rows."}
    text = ModelCard(**vars(CARD_OF) | changes).render(tokenizer=True)
    head, use, measured, rest = text.split("\n## ")
    assert head.startswith("---\nbase_model: org/name\n")
    assert "# Half\n\nFirst.\n\nSecond.\n" in head
    assert use.splitlines()[2:9] == [
        "```python",
        "import regard",
        "from transformers import AutoTokenizer, LlamaForCausalLM",
        "",
        "model = load()",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        "```",
    ]
    assert measured.splitlines()[2:] == ["| measure | value |", "|---|---|", "| loss | 1.235 |", "", "On ten rows."]
    assert rest == f"License\n\nNot known.\n\n{MARK}\n"


def test_what_there_is_not_is_left_out() -> None:
    text = CARD_OF.render()
    assert not any(word in text for word in ("Measured", "base_model", "tokenizer"))
    assert "base_model" not in ModelCard(**vars(CARD_OF) | {"base": "a-folder"}).render()


def test_only_a_card_of_our_own_is_written_again(tmp_path: Path) -> None:
    CARD_OF.write(tmp_path)
    ModelCard(**vars(CARD_OF) | {"title": "Other"}).write(tmp_path)
    assert "# Other" in (tmp_path / CARD).read_text(encoding="utf-8")
    (tmp_path / CARD).write_text("mine", encoding="utf-8")
    CARD_OF.write(tmp_path)
    assert (tmp_path / CARD).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("org/name", "org/name"),
        ("/home/someone/secret/base", "base"),
        ("gpt2", "gpt2"),
        ("./base", "base"),
        ("../base", "base"),
        ("/cache/hub/models--org--name/snapshots/0123abcd", "org/name"),
    ],
)
def test_a_name_tells_nothing_of_this_machine(name: str, expected: str) -> None:
    assert public_name(name) == expected
