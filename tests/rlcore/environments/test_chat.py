from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlcore.environments.base import Message
from rlcore.environments.chat import TemplateError, continuation_ids, opening_ids

pytestmark = pytest.mark.slow

OPENING = [Message("system", "Be short."), Message("user", "What is 2 + 3?")]
NEXT = [Message("user", "<result>5</result>"), Message("user", "Go on.")]
REPLY = "I will use a tool."

INSTRUCT = (  # the assistant's turn ends by the token of the end of the text, after a space
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[Q] {{ m.content }} [A]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
FORGETFUL = (  # what was thought is left out of earlier turns
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (  # generation begins with words that are not in the history
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"


@pytest.fixture
def tokenizer(embedded_model: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(embedded_model)


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """The whole conversation by the template at once."""
    listed = [message.as_dict() for message in messages]
    text = tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", [None, INSTRUCT])
def test_a_conversation_grown_by_ids_is_the_one_the_template_writes(
    tokenizer: PreTrainedTokenizerFast, template: str | None
) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    opening = OPENING if template is None else OPENING[1:]
    reply = REPLY if template is None else f" {REPLY}"
    ids = opening_ids(tokenizer, opening)
    ids += tokenizer.encode(reply, add_special_tokens=False)
    ids += continuation_ids(tokenizer, NEXT)
    whole = rendered(tokenizer, [*opening, Message("assistant", REPLY), *NEXT])
    assert tokenizer.decode(ids) == tokenizer.decode(whole)
    if template is None:
        assert ids == whole


@pytest.mark.parametrize(("template", "end"), [(None, "<|im_end|>"), (INSTRUCT, "<|im_end|>")])
def test_the_end_of_a_turn_is_not_doubled(
    tokenizer: PreTrainedTokenizerFast, template: str | None, end: str
) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    end_id = tokenizer.convert_tokens_to_ids(end)
    whole = continuation_ids(tokenizer, NEXT)
    rest = continuation_ids(tokenizer, NEXT, last_id=end_id)
    assert whole[-len(rest) :] == rest
    assert whole[: -len(rest)][-1] == end_id
    assert whole.index(end_id) == len(whole) - len(rest) - 1
    cut_off = tokenizer.encode(REPLY, add_special_tokens=False)[-1]
    assert continuation_ids(tokenizer, NEXT, last_id=cut_off) == whole


@pytest.mark.parametrize("template", [FORGETFUL, THINKING])
def test_a_template_that_rewrites_replies_is_refused(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer.chat_template = template
    assert opening_ids(tokenizer, OPENING)
    with pytest.raises(TemplateError, match="otherwise in the history"):
        continuation_ids(tokenizer, NEXT)


def test_a_missing_or_refusing_template_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = STRICT
    with pytest.raises(TemplateError, match="no system role"):
        opening_ids(tokenizer, OPENING)
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="has no chat template"):
        opening_ids(tokenizer, OPENING)
