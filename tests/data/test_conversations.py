"""Conversations are written by a chat template; a window is the beginning of one."""

import hashlib
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
import transformers

from regard.data import make_conversation_windows, make_text_windows, read_texts
from regard.data.conversations import (
    Conversation,
    describe_template,
    read_template,
    take_conversation,
    write_conversations,
)
from regard.data.texts import take_texts
from regard.errors import UserError

Words = Callable[[int, int], str]
TEMPLATE = "{{ '<s> ' }}{% for m in messages %}{{ m.role + ' ' + m.content + ' </s> ' }}{% endfor %}"
"""The roles are words here: w90 asks, w91 answers."""


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": f"w{90 + number % 2}", "content": text} for number, text in enumerate(texts)]


def conversations(*talks: Any) -> list[Conversation]:
    return [take_conversation(one, "a test", "texts") for one in talks]


@pytest.mark.parametrize(
    "name,bos,expected",
    [
        ("plain", "keep", [4, 100, 10, 11, 5, 101]),  # the BOS is that of the template
        ("with_bos", "keep", [4, 100, 10, 11, 5, 101]),  # of tokenizer and template one stays
        ("with_bos", "drop", [100, 10, 11, 5, 101, 12]),
        ("plain", "drop", [100, 10, 11, 5, 101, 12]),
        ("plain", "add", [4, 100, 10, 11, 5, 101]),
    ],
)
def test_a_window_is_the_beginning_of_a_conversation(
    name: str, bos: Any, expected: list[int], request: pytest.FixtureRequest
) -> None:
    found = make_conversation_windows(
        conversations(talk("w0 w1", "w2 w3 w4 w5")),
        request.getfixturevalue(name),
        length=6,
        samples=1,
        template=TEMPLATE,
        bos=bos,
    )
    assert found.input_ids.tolist() == [expected]


def test_each_conversation_gives_one_window_in_an_order_of_the_seed(with_bos: Any) -> None:
    talks = conversations(*(talk(f"w{number}", "w7 w7 w7 w7 w7 w7 w7") for number in range(6)), talk("w9"))
    options: dict[str, Any] = {"length": 5, "template": TEMPLATE}
    found = make_conversation_windows(talks, with_bos, samples=6, **options)
    assert sorted(found.input_ids[:, 2].tolist()) == [10, 11, 12, 13, 14, 15]
    assert [number + 10 for number in found.document_of] == found.input_ids[:, 2].tolist()
    drawn = {
        make_conversation_windows(talks, with_bos, samples=1, seed=seed, **options).document_of for seed in range(9)
    }
    assert len(drawn) > 2
    whole = make_conversation_windows(talks[6:] + talks[:1], with_bos, samples=1, seed=1, **options)
    assert (whole.documents, whole.too_short) in ((2, 1), (1, 0))
    with pytest.raises(UserError, match="samples: expected conversations with 7 windows of 5 tokens, found 6; ask for"):
        make_conversation_windows(talks, with_bos, samples=7, **options)
    with pytest.raises(
        UserError, match=r"length: expected a conversation of at least 30 tokens, the longest .* has 13;"
    ):
        make_conversation_windows(talks, with_bos, samples=1, length=30, template=TEMPLATE)
    with pytest.raises(UserError, match=r"a conversation of at least 5 tokens, the longest found has 1;"):
        make_conversation_windows([], with_bos, samples=1, **options)


def test_the_template_of_the_tokenizer_is_the_default(with_bos: Any, recwarn: pytest.WarningsRecorder) -> None:
    talks = conversations(talk("w0", "w1"))
    with pytest.raises(UserError, match=r"with a chat template for conversations, this has none; --chat-template FILE"):
        make_conversation_windows(talks, with_bos, length=4, samples=1)
    with_bos.chat_template = TEMPLATE
    found = make_conversation_windows(talks, with_bos, length=4, samples=1)
    assert found.input_ids.tolist() == [[4, 100, 10, 5]]
    assert not recwarn.list  # no word of special tokens that are written in texts
    text = next(write_conversations(talks, with_bos))
    assert text == "<s> w90 w0 </s> w91 w1 </s> "
    with pytest.warns(UserWarning, match="the names of special tokens"):
        same = make_text_windows([text], with_bos, length=7, samples=1)
    whole = make_conversation_windows(talks, with_bos, length=7, samples=1)
    assert same.input_ids.tolist() == whole.input_ids.tolist() == [[4, 100, 10, 5, 101, 11, 5]]


def test_rows_of_tables_are_conversations(tmp_path: Path) -> None:
    talks = [talk("w0", "w1"), talk("w2")]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks))
    table = pa.table({"id": [1, 2], "messages": [[{**message, "name": None} for message in one] for one in talks]})
    pyarrow.parquet.write_table(table, tmp_path / "talks.parquet")
    found = [read_texts([tmp_path / name], conversations=True) for name in ("talks.jsonl", "talks.parquet")]
    given = take_texts([{"messages": one} for one in talks])
    assert found[0].conversations == found[1].conversations == given.conversations == take_texts(talks).conversations
    assert {len(one.sha256) for one in found} == {64}
    assert found[0].sha256 == found[1].sha256 == given.sha256
    assert take_texts(talks[:1]).sha256 != given.sha256
    assert found[0].documents == ()
    assert "2 conversations" in repr(found[0])


def test_text_beside_messages_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "both.jsonl").write_text(json.dumps({"text": "w0", "messages": talk("w1")}) + "\n")
    found = read_texts([tmp_path / "both.jsonl"], conversations=True)
    assert found.documents == ("w0",)
    assert not found.conversations
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk("w1")}) + "\n")
    with pytest.raises(UserError, match="texts: expected either texts or conversations, got both in"):
        read_texts([tmp_path], conversations=True)
    with pytest.raises(UserError, match="expected the column 'text'"):
        read_texts([tmp_path / "talks.jsonl"])
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk("w1")}) + '\n{"text": "w0"}\n')
    with pytest.raises(UserError, match=r"texts: expected the column 'messages' in .*line 2, found text"):
        read_texts([tmp_path / "talks.jsonl"], conversations=True)


def test_a_column_of_conversations_has_another_name(tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text(json.dumps({"id": 1, "conversations": talk("w1")}) + "\n")
    with pytest.raises(UserError, match=r"'messages' in .*line 1, found id, conversations; give each message its"):
        read_texts([tmp_path / "talks.jsonl"], conversations=True)
    with pytest.raises(UserError, match=r"expected the column 'text' in .*; write conversations as text first, by"):
        read_texts([tmp_path / "talks.jsonl"])
    (tmp_path / "talks.jsonl").write_text(json.dumps({"text": "w0", "conversations": talk("w1")}) + "\n")
    assert read_texts([tmp_path / "talks.jsonl"], conversations=True).documents == ("w0",)


def test_parts_of_a_content_are_one_text_and_calls_of_tools_stay() -> None:
    parts = [{"type": "text", "text": "w0 "}, {"type": "text", "text": "w1"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "w5"}]}
    (found,) = conversations([{"role": "user", "content": parts}, call])
    assert found.messages == ({"role": "user", "content": "w0 w1"}, call)


@pytest.mark.parametrize(
    "value,message",
    [
        ({"messages": []}, "expected a list of messages, each with role and content, in a test, got an empty one"),
        ({"messages": "w0"}, "expected a list of messages, each with role and content, in a test, got str"),
        ([{"from": "human", "value": "w0"}], "each with role and content, in a test, got fields from, value"),
        ([{"role": "user"}], "expected text as content of each message in a test, got none"),
        ([{"role": "user", "content": 5}], "expected text as content of each message in a test, got int"),
        ([{"role": "user", "content": 5, "id": "a"}], "expected text as content of each message in a test, got int"),
        (
            [{"role": "user", "content": None, "id": "a"}],
            "expected text as content of each message in a test, got none",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w0"}], "name": "a"}],
            "expected text as content of each message in a test, got image",
        ),
        (
            {"messages": [{"role": "user", "content": "w0"}], "tools": "none"},
            "expected a list of tools, each a JSON schema, in a test, got str",
        ),
        ([{"role": "user", "content": [{"type": "image", "url": "a"}]}], "of each message in a test, got image"),
    ],
)
def test_what_is_no_conversation_is_refused(value: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^texts: .*{message}$"):
        take_conversation(value, "a test", "texts")


def test_a_conversation_that_the_template_refuses_is_named(with_bos: Any, tmp_path: Path) -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(
        UserError, match=r"texts: the chat template cannot write conversation 0: .*roles must alternate"
    ):
        list(write_conversations(conversations(talk("w0")), with_bos, strict))
    last = conversations(*[talk("w7 w7 w7")] * 5, talk("w9"))
    picky = "{% if messages[0].content == 'w9' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    for seed in range(3):
        with pytest.raises(UserError, match="the chat template cannot write conversation 5: no"):
            make_conversation_windows(last, with_bos, length=3, samples=6, template=picky, seed=seed)
    with_bos.chat_template = {"rag": "w0"}  # several by name, without a default
    with pytest.raises(UserError, match=r"the chat template cannot write conversation 0: .*no default"):
        list(write_conversations(last, with_bos))
    (tmp_path / "empty.jinja").write_text(" \n")
    with pytest.raises(UserError, match=r"chat-template: expected a chat template in Jinja, .*empty.jinja is empty"):
        read_template(str(tmp_path / "empty.jinja"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "chat_template": TEMPLATE}))
    assert read_template(str(tmp_path / "tokenizer_config.json")) == TEMPLATE
    for content in ("{}", "{% if a %}", '["chat_template"]', '{"chat_template": [{"name": "default"}]}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(UserError, match=r"in JSON one under 'chat_template'; .*other.json has none"):
            read_template(str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="chat-template: expected a file, there is no"):
        read_template(str(tmp_path / "gone.jinja"))


def test_tools_of_a_row_are_written(with_bos: Any, tmp_path: Path) -> None:
    tools = [{"name": "w20"}, {"name": "w21", "parameters": {"type": "w30"}}]
    rows = [{"messages": talk("w1"), "tools": tools}, {"messages": talk("w1"), "tools": None}]
    template = "{% for tool in tools or [] %}{{ tool.name + ' ' }}{% endfor %}{{ messages[0].content }}"
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "talks.parquet")
    found = [read_texts([tmp_path / name], conversations=True) for name in ("talks.jsonl", "talks.parquet")]
    as_json = [{**rows[0], "tools": json.dumps(tools)}, rows[1]]
    for texts in (*found, take_texts(rows), take_texts(as_json)):
        assert list(write_conversations(texts.conversations, with_bos, template)) == ["w20 w21 w1", "w1"]
        assert texts.sha256 == found[0].sha256
    assert take_texts(rows[:1]).sha256 != take_texts([{"messages": talk("w1")}]).sha256
    with_bos.chat_template = {"default": "{{ messages[0].content + ' w0' }}", "tool_use": template}
    assert list(write_conversations(found[0].conversations, with_bos)) == ["w20 w21 w1", "w1 w0"]


def test_nulls_that_a_table_fills_in_are_left_out(tmp_path: Path) -> None:
    calls = [{"name": "w5", "arguments": {"city": "w6"}}, {"name": "w5", "arguments": {"day": "w7"}}]
    talks = [[{"role": "user", "content": "w0"}, {"role": "assistant", "tool_calls": [call]}] for call in calls]
    pyarrow.parquet.write_table(pa.table({"messages": talks}), tmp_path / "talks.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "talks.parquet")
    assert rows["messages"][0].as_py()[1]["tool_calls"][0]["arguments"] == {"city": "w6", "day": None}
    found = read_texts([tmp_path / "talks.parquet"], conversations=True)
    assert found.sha256 == take_texts(talks).sha256 == take_texts(rows.to_pandas()["messages"]).sha256


@pytest.mark.parametrize(
    "template,expected",
    [
        ("{% for part in messages[0].content if part.type == 'text' %}{{ part.text }}{% endfor %}", "w3"),
        ("{% if messages[0].content is string %}w8{% else %}{{ messages[0].content[0].text }}{% endif %}", "w3"),
        ("{{ messages[0].content | trim }}", "w3"),
        ("w8 {{ messages[0].role }}", None),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% else %}w8{% endif %}", "w3"),
    ],
)
def test_a_template_of_parts_is_given_parts(template: str, expected: str | None, with_bos: Any) -> None:
    talks = conversations(talk("w3"), talk("w3", "w4"))
    if expected is None:
        with pytest.raises(UserError, match="expected a chat template that writes messages, it writes 'w8 w90' of"):
            list(write_conversations(talks, with_bos, template))
        return
    assert list(write_conversations(talks, with_bos, template)) == [expected] * 2


def test_what_is_given_in_python_is_told_from_conversations() -> None:
    with pytest.raises(UserError, match=r"got one conversation; pass a list of conversations, as \[texts\]$"):
        take_texts(talk("w0", "w1"))
    with pytest.raises(UserError, match=r"pass one entry of each, as \[row\['text'\] for row in texts\]"):
        take_texts([{"messages": talk("w0"), "text": "w1"}])  # as in a file, of which the text is read
    with pytest.raises(UserError, match="with role and content, in conversation 1, got an empty one"):
        take_texts([talk("w0"), []])
    with pytest.raises(UserError, match="texts: expected Unicode in conversation 1, got half of a surrogate pair"):
        take_texts([talk("w0"), talk("\ud800")])
    frame = pd.DataFrame({"messages": [talk("w0")], "tools": [[{"name": "w1"}]]})
    with pytest.raises(UserError, match=r"got a DataFrame; pass its rows, as texts.to_dict\('records'\)"):
        take_texts(frame)
    assert take_texts(frame.to_dict("records")).conversations[0].tools == ({"name": "w1"},)


def test_a_template_that_writes_the_date_has_it_in_its_record(with_bos: Any) -> None:
    dated = describe_template(with_bos, "{{ strftime_now('%d %b %Y') }}")
    assert len(dated["chat_template_date"]) == len("2026-11-30")
    with_bos.chat_template = "w0"
    assert describe_template(with_bos, None) == {"chat_template_sha256": hashlib.sha256(b"w0").hexdigest()}
    with_bos.chat_template = {"default": "w0", "tool_use": "w1"}
    assert describe_template(with_bos, None).keys() == {"chat_template_sha256"}


@pytest.mark.parametrize("is_given", [True, False])
def test_markers_that_a_tokenizer_reads_as_pieces_are_told(is_given: bool, bytewise: Any) -> None:
    """A base model has no tokens of turns: its texts had other tokens than those of its chat version, untold."""
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<end_of_turn>{% endfor %}"
    tokenizer, talks = bytewise, conversations(talk("a<b>c"), talk("d"))
    tokenizer.chat_template = template if not is_given else "another"
    expected = ["<|im_start|>a<b>c<end_of_turn>", "<|im_start|>d<end_of_turn>"]
    if not is_given:  # a model was trained on what its own writes, also where a file has it
        assert list(write_conversations(talks, tokenizer)) == expected
        assert list(write_conversations(talks, tokenizer, template)) == expected
        return
    told = r"reads as several tokens each: <\|im_start\|> \(12\), <end_of_turn> \(13\); "
    with pytest.warns(UserWarning, match=told):
        assert next(write_conversations(talks, tokenizer, template)) == expected[0]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<end_of_turn>"]})
    assert list(write_conversations(talks, tokenizer, template)) == expected


def test_text_of_a_template_is_no_marker(bytewise: Any) -> None:
    """Llama 2 was trained on <<SYS>> in pieces, Mistral on [INST]."""
    template = "{% for m in messages %}[INST] <<SYS>>\nBe kind.\n<</SYS>> {{ m.content }} [/INST]{% endfor %}"
    (text,) = write_conversations(conversations(talk("a")), bytewise, template)
    assert text == "[INST] <<SYS>>\nBe kind.\n<</SYS>> a [/INST]"


@pytest.fixture
def bytewise() -> Any:
    """Return a tokenizer of characters."""
    characters = {one: number for number, one in enumerate(string.printable)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(characters, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
