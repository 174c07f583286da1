"""From messages to token ids by the tokenizer's chat template, tokens in and tokens out.

What the policy sampled is never turned into text and back: a conversation grows by the ids that the
template puts after an assistant's reply, which are read off the template with a fixed reply in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.environments.base import Message
from rlcore.errors import PacelineError

PROBE_QUESTION = Message("user", "Question?")
PROBE_REPLY = "xyzzy-reply-xyzzy"
"""Stands where a reply would. No template contains it, and none has a reason to change it."""


class TemplateError(PacelineError):
    """A chat template that cannot be used for rollouts."""


def opening_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The prompt: all messages and the words that let the assistant begin.

    ``tokenizer`` is a Hugging Face tokenizer. Raises TemplateError if it has no template, or the template
    refuses these messages.
    """
    return _encode(tokenizer, _render(tokenizer, messages, generate=True))


def continuation_ids(
    tokenizer: Any, messages: Sequence[Message], last_id: int | None = None
) -> list[int]:
    """What follows an assistant's reply, up to and including the words that let it begin again.

    That is the end of its turn, the ``messages`` of the environment, and the next generation prompt.
    ``last_id`` is the last id that the policy sampled: when it ended its turn itself, that token is not
    repeated. The ids do not depend on the conversation so far; raises TemplateError where the template
    makes them depend on it, by writing a reply otherwise once it lies in the past.
    """
    opening = _render(tokenizer, [PROBE_QUESTION], generate=True)
    replied = [PROBE_QUESTION, Message("assistant", PROBE_REPLY)]
    grown = _render(tokenizer, [*replied, *messages], generate=True)
    before, found, after = grown.partition(PROBE_REPLY)
    # a space before the reply in the history is one that the policy samples as part of its first token
    if not found or before.rstrip() != opening.rstrip():
        raise TemplateError(
            "the chat template writes an assistant's reply otherwise in the history than it was "
            "generated, so rollouts of several turns would train on text that was never sampled; use a "
            "template that keeps replies as they are, or an environment of one turn"
        )
    ids = _encode(tokenizer, after)
    ended = _render(tokenizer, replied, generate=False).partition(PROBE_REPLY)[2]
    end_of_turn = ids[: len(_encode(tokenizer, ended))]
    if last_id in end_of_turn:
        return ids[end_of_turn.index(last_id) + 1 :]
    return ids


def _render(tokenizer: Any, messages: Sequence[Message], generate: bool) -> str:
    if not tokenizer.chat_template:
        raise TemplateError(
            "the tokenizer has no chat template; rollouts need one (chat_template.jinja in the "
            "model's folder)"
        )
    listed = [message.as_dict() for message in messages]
    try:
        return tokenizer.apply_chat_template(listed, add_generation_prompt=generate, tokenize=False)
    except Exception as error:  # templates raise as they like: jinja2's own errors, TypeError, ...
        raise TemplateError(f"the chat template refuses these messages: {error}") from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    """The template has written the special tokens already."""
    return list(tokenizer.encode(text, add_special_tokens=False))
