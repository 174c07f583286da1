"""Clients that people have, unchanged: openai's async side, anthropic, LangChain; each sees what is ours too.

What ``test_openai_client.py`` asks of the ``openai`` package is not asked again.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import anthropic
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

from tests.conftest import SPECULATIVE_TOKENS, Served

pytestmark = [pytest.mark.slow, pytest.mark.on_server("eagle3")]

USAGE = {"x-paceline-usage": "true"}
ANIMALS = ("cat", "dog", "horse", "crow", "trout", "bee")


class Pet(BaseModel):
    """A pet."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    tame: bool


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def emitted_by(account: dict[str, Any]) -> int:
    return sum(v["emitted"] + v["plain_steps"] for v in account["versions"])


def check_account(account: dict[str, Any], tokens: int) -> None:
    assert tokens - 1 <= emitted_by(account) <= tokens - 1 + SPECULATIVE_TOKENS


def check_captured(served: Served, response_id: str, tokens: int) -> None:
    """The learner got what the client got: all but the prefill's token were emitted by steps."""
    spans = served.tap.of_response(response_id, tokens)
    assert sum(len(span.trace.emitted_ids()) for span in spans) == tokens


# --- openai, asynchronous ---------------------------------------------------------------------------


def in_loop(served: Served, work: Any) -> Any:
    """Run ``work(client)`` with an asynchronous client."""

    async def run() -> Any:
        async with AsyncOpenAI(
            base_url=served.server.openai_url, api_key="none", timeout=120.0, max_retries=0
        ) as client:
            return await work(client)

    return asyncio.run(run())


def test_parallel_async_streams_are_the_answers_that_each_gets_alone(served: Served) -> None:
    settings = {"model": served.model, "max_tokens": 16, "temperature": 0.0}
    prompts = [question(f"What does a {animal} eat?") for animal in ANIMALS]

    async def stream(client: AsyncOpenAI, messages: Any) -> tuple[str, str]:
        text, response_id = "", ""
        async for chunk in await client.chat.completions.create(
            messages=messages, stream=True, **settings
        ):
            response_id = chunk.id
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        return response_id, text

    async def together(client: AsyncOpenAI) -> list[tuple[str, str]]:
        return await asyncio.gather(*(stream(client, messages) for messages in prompts))

    answers = in_loop(served, together)
    assert len({response_id for response_id, _ in answers}) == len(ANIMALS)
    for messages, (response_id, text) in zip(prompts, answers, strict=True):
        alone = served.openai.chat.completions.create(messages=messages, **settings)
        assert text == alone.choices[0].message.content
        check_captured(served, response_id, alone.usage.completion_tokens)


def test_an_async_stream_that_is_left_ends_and_the_next_request_is_served(served: Served) -> None:
    async def leave(client: AsyncOpenAI) -> tuple[int, str]:
        settings = {"model": served.model, "messages": question("Count to a thousand.")}
        stream = await client.chat.completions.create(**settings, max_tokens=600, stream=True)
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == 5:
                break
        await stream.close()
        answer = await client.chat.completions.create(**settings, max_tokens=4, temperature=0.0)
        return seen, answer.choices[0].message.content

    seen, text = in_loop(served, leave)
    assert seen == 5
    assert text


def test_the_async_helpers_parse_structured_output_and_tell_of_their_stream(served: Served) -> None:
    settings = {"model": served.model, "messages": question("Describe my pet as JSON.")}

    async def work(client: AsyncOpenAI) -> tuple[Pet, list[str], Any]:
        parsed = await client.chat.completions.parse(
            **settings, response_format=Pet, max_tokens=60, temperature=0.0
        )
        async with client.chat.completions.stream(
            **settings, response_format=Pet, max_tokens=60, temperature=0.0,
            stream_options={"include_usage": True}, extra_headers=USAGE,
        ) as stream:  # fmt: skip
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        return parsed.choices[0].message.parsed, kinds, final

    pet, kinds, final = in_loop(served, work)
    assert isinstance(pet, Pet)
    assert final.choices[0].message.parsed == pet
    assert "content.delta" in kinds
    assert kinds.index("content.delta") < kinds.index("content.done")
    check_account(final.usage.model_extra["paceline"], final.usage.completion_tokens)


def test_async_responses_stream_and_parse(served: Served) -> None:
    settings = {"model": served.model, "input": "Describe my pet as JSON.", "temperature": 0.0}

    async def work(client: AsyncOpenAI) -> tuple[Pet, Pet, list[str]]:
        whole = await client.responses.parse(**settings, text_format=Pet, max_output_tokens=60)
        async with client.responses.stream(
            **settings, text_format=Pet, max_output_tokens=60
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        return whole.output_parsed, final.output_parsed, kinds

    whole, streamed, kinds = in_loop(served, work)
    assert isinstance(whole, Pet)
    assert whole == streamed
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


def test_the_clients_pages_and_single_models(served: Served) -> None:
    async def work(client: AsyncOpenAI) -> tuple[list[str], str]:
        listed = [model.id async for model in client.models.list()]
        raw = await client.completions.with_raw_response.create(
            model=served.model, prompt="One", max_tokens=1
        )
        return listed, raw.headers["x-paceline-draft-version"]

    listed, version = in_loop(served, work)
    assert listed == [served.model]
    assert version == str(served.server.status()["draft"]["live"])


def test_what_speculation_cannot_do_is_refused_in_a_known_error(served: Served) -> None:
    ask = {"model": served.model, "messages": question("Name a fruit."), "max_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="speculative"):
        served.openai.chat.completions.create(**ask, logit_bias={"5": 10})
    with pytest.raises(openai.BadRequestError, match="speculative"):
        served.openai.chat.completions.create(**ask, extra_body={"min_p": 0.1})


# --- anthropic --------------------------------------------------------------------------------------


GREEDY = {"temperature": 0.0}
"""In the body: Anthropic's own models take no temperature any more, so its client has no argument for it."""


def claude(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=served.server.url, api_key="none", timeout=120.0, max_retries=0
    )


def test_an_anthropic_message_streamed_and_whole_are_the_same_text(served: Served) -> None:
    client = claude(served)
    settings = {
        "model": served.model, "max_tokens": 20, "system": "You are terse.", "extra_body": GREEDY,
        "messages": question("Name three colours."), "extra_headers": USAGE,
    }  # fmt: skip
    whole = client.messages.create(**settings)
    assert whole.role == "assistant"
    (block,) = whole.content
    with client.messages.stream(**settings) as stream:
        events = list(stream)
        final = stream.get_final_message()
    text = "".join(event.text for event in events if event.type == "text")
    (delta,) = [event for event in events if event.type == "message_delta"]
    assert text == block.text == final.content[0].text
    tokens = whole.usage.output_tokens
    assert whole.stop_reason == final.stop_reason == ("max_tokens" if tokens == 20 else "end_turn")
    assert 1 < tokens == final.usage.output_tokens
    for usage in (whole.usage, delta.usage):  # of a stream's, the client keeps only what it knows
        check_account(usage.model_extra["paceline"], tokens)
    for message in (whole, final):
        check_captured(served, message.id, tokens)


def test_anthropics_system_prompt_and_turns_are_those_of_a_chat(served: Served) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "My name is Ada."}]},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": "What is my name?"},
    ]
    message = claude(served).messages.create(
        model=served.model,
        max_tokens=12,
        system="You are terse.",
        messages=turns,
        extra_body=GREEDY,
    )
    chat = served.openai.chat.completions.create(
        model=served.model, max_tokens=12, temperature=0.0,
        messages=[
            {"role": "system", "content": "You are terse."},
            *({"role": t["role"], "content": t["content"]} for t in turns),
        ],
    )  # fmt: skip
    assert message.content[0].text == chat.choices[0].message.content
    assert message.usage.input_tokens == chat.usage.prompt_tokens


def test_anthropics_stop_sequence_ends_the_message(served: Served) -> None:
    client = claude(served)
    settings = {"model": served.model, "max_tokens": 24, "extra_body": GREEDY}
    messages = question("Count from one to ten.")
    text = client.messages.create(messages=messages, **settings).content[0].text
    stop = text[len(text) // 2 :][:3]
    stopped = client.messages.create(messages=messages, **settings, stop_sequences=[stop])
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == stop
    assert stopped.content[0].text == text[: text.index(stop)]


def test_anthropics_count_is_what_the_message_takes(served: Served) -> None:
    client = claude(served)
    ask = {
        "model": served.model,
        "messages": question("Name three colours."),
        "system": "Be brief.",
    }
    counted = client.messages.count_tokens(**ask).input_tokens
    assert counted == client.messages.create(**ask, max_tokens=1).usage.input_tokens


def test_anthropics_client_is_told_of_tools(served: Served) -> None:
    message = claude(served).messages.create(
        model=served.model, max_tokens=100, extra_body=GREEDY,
        messages=question("Switch the kitchen light on."),
        tool_choice={"type": "tool", "name": "set_light"},
        tools=[
            {
                "name": "set_light",
                "description": "Switch the light",
                "strict": True,
                "input_schema": {
                    "type": "object",
                    "properties": {"on": {"type": "boolean"}},
                    "required": ["on"],
                    "additionalProperties": False,
                },
            }
        ],
    )  # fmt: skip
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name == "set_light"
    assert isinstance(call.input["on"], bool)
    assert message.stop_reason == "tool_use"


def test_anthropics_errors_are_of_the_classes_that_its_client_knows(served: Served) -> None:
    client = claude(served)
    ask = {"messages": question("Hello."), "max_tokens": 4}
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nobody", **ask)
    assert missing.value.body["type"] == "error"
    assert missing.value.body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=served.model, **ask, extra_body={"temperature": -1.0})
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=served.model, max_tokens=4, messages=question("word " * 2000))
    assert client.messages.create(model=served.model, **ask).content


def test_anthropics_async_client_streams(served: Served) -> None:
    async def run() -> list[str]:
        async with anthropic.AsyncAnthropic(
            base_url=served.server.url, api_key="none", timeout=120.0, max_retries=0
        ) as client:
            stream = await client.messages.create(
                model=served.model, max_tokens=6, messages=question("Name a fruit."), stream=True
            )
            return [event.type async for event in stream]

    kinds = asyncio.run(run())
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_delta") >= 1


# --- LangChain --------------------------------------------------------------------------------------


@tool
def set_light(on: bool) -> str:
    """Switch the light."""
    return "done"


def lang(served: Served, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=served.model, base_url=served.server.openai_url, api_key="none", temperature=0.0,
        timeout=120.0, max_retries=0, **settings,
    )  # fmt: skip


def test_langchain_invokes_and_streams_the_same_text(served: Served) -> None:
    model = lang(served, max_tokens=16, stream_usage=True)
    messages = [SystemMessage("You are terse."), HumanMessage("Name three colours.")]
    whole = model.invoke(messages)
    parts = list(model.stream(messages))
    text = "".join(str(part.content) for part in parts)
    assert text == whole.content
    tokens = whole.usage_metadata["output_tokens"]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    for count in ("input_tokens", "output_tokens"):
        assert total.usage_metadata[count] == whole.usage_metadata[count]
    assert whole.response_metadata["finish_reason"] == ("length" if tokens == 16 else "stop")
    check_captured(served, whole.response_metadata["id"], tokens)


def test_langchain_passes_our_headers_and_shows_ours(served: Served) -> None:
    model = lang(served, max_tokens=8, default_headers=USAGE, include_response_headers=True)
    answer = model.invoke("Name a fruit.")
    assert answer.response_metadata["headers"]["x-paceline-draft-version"] == str(
        served.server.status()["draft"]["live"]
    )
    account = answer.response_metadata["token_usage"]["paceline"]
    check_account(account, answer.usage_metadata["output_tokens"])


def test_langchain_runs_a_batch_and_an_async_call(served: Served) -> None:
    model = lang(served, max_tokens=8)
    prompts = [f"What does a {animal} eat?" for animal in ANIMALS[:3]]
    batch = model.batch(prompts)
    alone = asyncio.run(model.ainvoke(prompts[1]))
    assert batch[1].content == alone.content
    assert len({answer.content for answer in batch}) > 1


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchains_structured_output_is_an_object_of_its_class(
    served: Served, method: str
) -> None:
    model = lang(served, max_tokens=100).with_structured_output(Pet, method=method, strict=True)
    assert isinstance(model.invoke("Describe my pet as JSON."), Pet)


def test_langchains_bound_tool_is_called_and_its_result_is_taken(served: Served) -> None:
    model = lang(served, max_tokens=100)
    ask: list[Any] = [HumanMessage("Switch the kitchen light on.")]
    answer = model.bind_tools([set_light], tool_choice="set_light", strict=True).invoke(ask)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "set_light"
    assert isinstance(call["args"]["on"], bool)
    json.dumps(call["args"])
    result = ToolMessage(set_light.invoke(call["args"]), tool_call_id=call["id"])
    after = model.bind_tools([set_light]).invoke([*ask, answer, result])
    assert after.content or after.tool_calls
