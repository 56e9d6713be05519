"""Conversations: messages with roles, written as text by the chat template of a tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.data.tables import read_pieces
from regard.errors import UserError, describe_error

MESSAGES = "messages"
"""The column of conversations."""
_EXPECTED = "a list of messages, each with role and content"


@dataclass(frozen=True)
class Conversation:
    """Messages, as a chat template takes them."""

    messages: tuple[Mapping[str, Any], ...]

    def to_json(self) -> str:
        """Return the messages as JSON, their fields in order of their names."""
        return json.dumps(self.messages, ensure_ascii=False, sort_keys=True, default=str)


def take_conversation(value: Any, place: str, option: str) -> Conversation:
    """Return the conversation that a value is, or has under `messages`.

    Raises:
        UserError: It is none, or has something else than text.
    """
    found = value.get(MESSAGES) if isinstance(value, Mapping) else value
    messages = tuple(found) if isinstance(found, (list, tuple)) else ()
    if not messages:
        raise UserError(f"{option}: expected {_EXPECTED}, in {place}, got {type(found).__name__}")
    return Conversation(tuple(_take_message(message, place, option) for message in messages))


def is_conversation(value: Any) -> bool:
    """Return whether a value is a list of messages, or has one under `messages`."""
    found = value.get(MESSAGES) if isinstance(value, Mapping) else value
    return isinstance(found, (list, tuple)) and bool(found) and all(isinstance(one, Mapping) for one in found)


def _take_message(message: Any, place: str, option: str) -> Mapping[str, Any]:
    """Return a message whose content is one text, without fields that are null, as tables fill them in."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        got = f"fields {', '.join(map(str, message))}" if isinstance(message, Mapping) else type(message).__name__
        raise UserError(f"{option}: expected {_EXPECTED}, in {place}, got {got}")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        content = None if None in texts else "".join(map(str, texts))
    fields = {name: value for name, value in message.items() if value is not None}
    if not isinstance(content, str) and fields.keys() - {"role"} <= {"content"}:
        raise UserError(f"{option}: expected text as content of each message in {place}, got {_describe(message)}")
    return {**fields, "content": content}


def _describe(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        kinds = [
            str(part.get("type", "a part")) if isinstance(part, Mapping) else type(part).__name__ for part in content
        ]
        return ", ".join(dict.fromkeys(kind for kind in kinds if kind != "text")) or "none"
    return "none" if content is None else type(content).__name__


def read_template(path: str, option: str = "chat-template") -> str:
    """Return the chat template in a file, such as chat_template.jinja of a saved tokenizer."""
    text = "".join(read_pieces(Path(os.path.expanduser(path)), option))
    if not text.strip():
        raise UserError(f"{option}: expected a chat template in Jinja, {path} is empty")
    return text


def write_conversations(
    conversations: Sequence[Conversation], tokenizer: Any, template: str | None = None
) -> Iterator[str]:
    """Yield each conversation as text, by a template, or by the tokenizer's own.

    Raises:
        UserError: There is no template, or it refuses a conversation.
    """
    template = find_template(tokenizer, template)
    for number, conversation in enumerate(conversations):
        try:
            yield tokenizer.apply_chat_template(list(conversation.messages), chat_template=template, tokenize=False)
        except Exception as error:  # a template raises what it likes
            reason = describe_error(error)[:200]
            raise UserError(f"texts: the chat template cannot write conversation {number}: {reason}") from error


def find_template(tokenizer: Any, template: str | None) -> str:
    """Return a template, or the tokenizer's own. UserError without any."""
    if template is not None:
        return template
    if not getattr(tokenizer, "chat_template", None):
        advice = "--chat-template FILE (chat_template=) names one, as that of the model's chat version"
        raise UserError(f"texts: expected a tokenizer with a chat template for conversations, this has none; {advice}")
    return str(tokenizer.get_chat_template())
