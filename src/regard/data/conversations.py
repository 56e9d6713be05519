"""Conversations: messages with roles, written as text by the chat template of a tokenizer."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from regard.data.tables import read_pieces
from regard.errors import UserError, describe_error, warn_user

MESSAGES, TOOLS = "messages", "tools"
"""The columns of conversations, and of the tools that a model may call in them."""
_EXPECTED = "a list of messages, each with role and content"
_MARKER = re.compile(r"(?<!<)<[|｜]?[\w▁]+[|｜]?>")  # Llama 2 writes <<SYS>>, which is text
_CALLS = ("tool_calls", "function_call")
"""Fields of a message that may have no content."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and descriptions of tools, as a chat template takes them."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> str:
        """Return the messages as JSON, their fields in order of their names; with tools, both in a list."""
        parts = [self.messages, self.tools] if self.tools else self.messages
        return json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)


def take_conversation(value: Any, place: str, option: str) -> Conversation:
    """Return the conversation that a value is, or has under `messages`, with the `tools` beside it.

    Fields that are null are left out, also within others: tables fill them in where another row has them.

    Raises:
        UserError: It is none, or has something else than text.
    """
    found = _find_messages(value)
    if not isinstance(found, (list, tuple)) or not found:
        got = "an empty one" if isinstance(found, (list, tuple)) else type(found).__name__
        raise UserError(f"{option}: expected {_EXPECTED}, in {place}, got {got}")
    messages = tuple(_take_message(_clean(message), place, option) for message in found)
    return Conversation(messages, _take_tools(value.get(TOOLS), place, option) if isinstance(value, Mapping) else ())


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages, or has one under `messages` and no text."""
    if isinstance(value, Mapping) and not has_messages(value):
        return False
    found = _find_messages(value)
    return isinstance(found, (list, tuple)) and all(isinstance(one, Mapping) for one in found)


def has_messages(row: Mapping[str, Any]) -> bool:
    """Return whether a row has the column of messages, and no text, which it would be read as."""
    return MESSAGES in row and "text" not in row


def _find_messages(value: Any) -> Any:
    """Return what a value is, or has under `messages`; arrays, as those of pandas, as lists."""
    found = value.get(MESSAGES) if isinstance(value, Mapping) else value
    return found.tolist() if isinstance(found, np.ndarray) else found


def _clean(value: Any) -> Any:
    """Return a value of a table with arrays as lists, and without fields that are null."""
    if isinstance(value, Mapping):
        return {str(name): _clean(one) for name, one in value.items() if one is not None}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_clean(one) for one in value]
    return value


def _take_message(message: Any, place: str, option: str) -> Mapping[str, Any]:
    """Return a message whose content is one text, or none where it calls a tool."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        got = f"fields {', '.join(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
        raise UserError(f"{option}: expected {_EXPECTED}, in {place}, got {got}")
    content = message.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        content = content if None in texts else "".join(map(str, texts))
    if not isinstance(content, str) and (content is not None or not any(map(message.get, _CALLS))):
        raise UserError(f"{option}: expected text as content of each message in {place}, got {_describe(message)}")
    return {**message, "content": content}


def _take_tools(value: Any, place: str, option: str) -> tuple[Mapping[str, Any], ...]:
    """Return descriptions of tools, which tables often have as JSON, since their fields differ."""
    tools = _clean(value)
    if isinstance(tools, str) and tools.strip():
        with suppress(ValueError):
            tools = json.loads(tools)
    tools = [] if tools in (None, "") else tools
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise UserError(
            f"{option}: expected a list of tools, each a JSON schema, in {place}, got {type(tools).__name__}"
        )
    return tuple(tools)


def _describe(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        kinds = [
            str(part.get("type", "a part")) if isinstance(part, Mapping) else type(part).__name__ for part in content
        ]
        return ", ".join(dict.fromkeys(kind for kind in kinds if kind != "text")) or "none"
    return "none" if content is None else type(content).__name__


def read_template(path: str, option: str = "chat-template") -> str:
    """Return the chat template in a file, as chat_template.jinja or tokenizer_config.json of a saved tokenizer."""
    text = "".join(read_pieces(Path(os.path.expanduser(path)), option))
    if path.lower().endswith(".json"):
        text = _find_in_json(text, path, option)
    if not text.strip():
        raise UserError(f"{option}: expected a chat template in Jinja, {path} is empty")
    return text


def _find_in_json(text: str, path: str, option: str) -> str:
    try:
        found = json.loads(text)["chat_template"]
    except (ValueError, LookupError, TypeError):
        found = None
    if not isinstance(found, str):
        raise UserError(f"{option}: expected a chat template, in JSON one under 'chat_template'; {path} has none")
    return found


def write_conversations(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    template: str | None = None,
    order: Sequence[int] | None = None,
) -> Iterator[str]:
    """Yield each conversation as text, by a template, or by the tokenizer's own; only some in an `order` of numbers.

    Raises:
        UserError: There is no template, or it refuses a conversation.
    """
    check_template(tokenizer, template)
    write = partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False)
    form, own = _find_form(write), getattr(tokenizer, "chat_template", None)
    is_checked = template in (None, own)  # a model was trained on what its own writes
    for number in range(len(conversations)) if order is None else order:
        one = conversations[number]
        messages = [_in_parts(message) if form == "parts" else message for message in one.messages]
        try:
            text = write(messages, tools=list(one.tools) or None)
        except Exception as error:  # a template raises what it likes
            reason = describe_error(error)[:200]
            raise UserError(f"texts: the chat template cannot write conversation {number}: {reason}") from error
        contents = [message["content"].strip() for message in one.messages if message["content"]]
        if not is_checked:
            is_checked = True
            _warn_of_pieces(text, contents, tokenizer)
        if form is None and any(contents) and not any(content and content in text for content in contents):
            raise UserError(f"texts: expected a chat template that writes messages, it writes {text[:40]!r} of each")
        yield text


def _warn_of_pieces(text: str, contents: Sequence[str], tokenizer: Any) -> None:
    """Warn of markers that a template writes around contents and a tokenizer reads piece by piece, as a base model's.

    They are such as `<|im_start|>` and `<start_of_turn>`.
    """
    markers = dict.fromkeys(one for one in _MARKER.findall(text) if not any(one in content for content in contents))
    pieces = {one: len(tokenizer.encode(one, add_special_tokens=False)) for one in markers}
    if torn := [f"{one} ({count})" for one, count in pieces.items() if count > 1]:
        warn_user(
            "texts: the chat template writes markers that this tokenizer reads as several tokens each: "
            f"{', '.join(torn[:5])}; its vocabulary lacks them, as that of a base model may"
        )


def _find_form(write: Callable[[list[Any]], str]) -> Literal["text", "parts"] | None:
    """Return what content of a message a template writes, a text or, as some of images beside it do, parts; or none."""
    message = {"role": "user", "content": "Regard asks"}
    try:
        if message["content"] in write([message]):
            return "text"
        return "parts" if message["content"] in write([_in_parts(message)]) else None
    except Exception:  # as of a template that expects other messages first
        return "text"


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return message if content is None else {**message, "content": [{"type": "text", "text": content}]}


def check_template(tokenizer: Any, template: str | None) -> None:
    """Raise UserError if there is no template, and the tokenizer has none."""
    if template is None and not getattr(tokenizer, "chat_template", None):
        advice = "--chat-template FILE (chat_template=) names one, as that of the model's chat version"
        raise UserError(f"texts: expected a tokenizer with a chat template for conversations, this has none; {advice}")


def describe_template(tokenizer: Any, template: str | None) -> dict[str, str]:
    """Return the SHA-256 of a template, or of the tokenizer's own, and today's date if it is one that writes it."""
    used = tokenizer.chat_template if template is None else template
    text = used if isinstance(used, str) else json.dumps(used, sort_keys=True)  # several, by name
    date = {"chat_template_date": datetime.date.today().isoformat()} if "strftime_now" in text else {}
    return {"chat_template_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(), **date}
