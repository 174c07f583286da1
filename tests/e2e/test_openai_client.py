"""The ``openai`` package against a real server: what clients rely on works, and ours is beside it."""

from __future__ import annotations

import json

import openai
import pytest

from tests.conftest import SPECULATIVE_TOKENS, Served

pytestmark = [pytest.mark.slow, pytest.mark.on_server("eagle3")]

USAGE = {"x-paceline-usage": "true"}
QUESTION = [{"role": "user", "content": "Name three colours."}]
LIGHT = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch the light",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}, "room": {"enum": ["kitchen", "hall"]}},
            "required": ["on", "room"],
            "additionalProperties": False,
        },
    },
}
PET = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "tame": {"type": "boolean"},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["kind", "tame", "legs"],
    "additionalProperties": False,
}


def check_account(usage, completion_tokens: int) -> None:
    """The account lists versions whose emitted tokens make up the answer, but for the first."""
    versions = usage.model_extra["paceline"]["versions"]
    assert versions
    emitted = sum(v["emitted"] + v["plain_steps"] for v in versions)
    # The prefill's token is no decode step, and the engine may run up to K past a stop.
    assert completion_tokens - 1 <= emitted <= completion_tokens - 1 + SPECULATIVE_TOKENS
    for version in versions:
        assert all(a <= d for a, d in zip(version["accepted"], version["drafted"], strict=True))


def check_light(arguments: str) -> None:
    light = json.loads(arguments)
    assert set(light) == {"on", "room"}
    assert isinstance(light["on"], bool)
    assert light["room"] in ("kitchen", "hall")


def test_a_chat_answer_streamed_and_whole_are_the_same_text(served: Served) -> None:
    settings = {"model": served.model, "messages": QUESTION, "max_tokens": 24, "temperature": 0.0}
    whole = served.openai.chat.completions.create(**settings)
    chunks = list(
        served.openai.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_completions_of_text_and_of_token_ids_agree_streamed_or_not(served: Served) -> None:
    settings = {"model": served.model, "max_tokens": 12, "temperature": 0.0}
    prompt = "The capital of France is"
    tokens = served.server.post("/tokenize", {"model": served.model, "prompt": prompt}).json()
    whole = served.openai.completions.create(prompt=prompt, **settings)
    by_ids = served.openai.completions.create(prompt=tokens["tokens"], **settings)
    parts = served.openai.completions.create(prompt=prompt, **settings, stream=True)
    assert whole.choices[0].text == by_ids.choices[0].text
    assert whole.choices[0].text == "".join(p.choices[0].text for p in parts)


def test_responses_streamed_and_whole_are_the_same_text(served: Served) -> None:
    settings = {
        "model": served.model, "input": "Name a fruit.", "max_output_tokens": 12, "temperature": 0.0,
    }  # fmt: skip
    whole = served.openai.responses.create(**settings)
    events = list(served.openai.responses.create(**settings, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert whole.output_text == text
    assert text
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_the_model_is_listed_under_its_name(served: Served) -> None:
    assert [m.id for m in served.openai.models.list()] == [served.model]


def test_text_goes_to_tokens_and_back(served: Served) -> None:
    text = "Die Kätzchen schlafen."
    tokens = served.server.post("/tokenize", {"model": served.model, "prompt": text}).json()
    body = {"model": served.model, "tokens": tokens["tokens"]}
    assert tokens["count"] == len(tokens["tokens"]) > 3
    assert served.server.post("/detokenize", body).json()["prompt"] == text


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_light"}}]
)
def test_a_demanded_tool_call_fits_its_schema(served: Served, choice) -> None:
    answer = served.openai.chat.completions.create(
        model=served.model, tools=[LIGHT], tool_choice=choice, max_tokens=100, temperature=0.0,
        messages=[{"role": "user", "content": "Switch the kitchen light on."}],
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "set_light"
    check_light(call.function.arguments)


def test_a_streamed_tool_call_puts_together_to_its_schema(served: Served) -> None:
    chunks = served.openai.chat.completions.create(
        model=served.model, tools=[LIGHT], max_tokens=100, temperature=0.0, stream=True,
        tool_choice={"type": "function", "function": {"name": "set_light"}},
        messages=[{"role": "user", "content": "Switch the hall light off."}],
    )  # fmt: skip
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert {c.function.name for c in calls if c.function.name} == {"set_light"}
    check_light("".join(c.function.arguments or "" for c in calls))


def test_an_offered_tool_is_parsed_or_answered_in_text(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model=served.model, tools=[LIGHT], tool_choice="auto", max_tokens=40, temperature=0.0,
        messages=[{"role": "user", "content": "Switch the kitchen light on."}],
    )  # fmt: skip
    message = answer.choices[0].message
    assert message.content or message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_fits_its_json_schema(served: Served, stream: bool) -> None:
    answer = served.openai.chat.completions.create(
        model=served.model, max_tokens=80, temperature=0.7, seed=3, stream=stream,
        messages=[{"role": "user", "content": "Describe my pet as JSON."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "pet", "schema": PET, "strict": True},
        },
    )  # fmt: skip
    if stream:
        text = "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
    else:
        text = answer.choices[0].message.content
    pet = json.loads(text)
    assert set(pet) == {"kind", "tame", "legs"}
    assert pet["kind"] in ("cat", "dog")
    assert isinstance(pet["tame"], bool)
    assert 0 <= pet["legs"] <= 9


def test_two_choices_are_two_answers(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model=served.model, messages=QUESTION, max_tokens=16, temperature=1.0, seed=5, n=2,
        extra_headers=USAGE,
    )  # fmt: skip
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    versions = answer.usage.model_extra["paceline"]["versions"]
    emitted = sum(v["emitted"] + v["plain_steps"] for v in versions)
    assert emitted >= answer.usage.completion_tokens - 2


def test_logprobs_are_those_of_the_emitted_tokens(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model=served.model, messages=QUESTION, max_tokens=10, temperature=0.0,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 10
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(max(t.logprob for t in entry.top_logprobs))
        assert entry.logprob <= 0


def test_every_answer_names_the_draft_version_that_served_it(served: Served) -> None:
    live = str(served.server.status()["draft"]["live"])
    raw = served.openai.chat.completions.with_raw_response
    settings = {"model": served.model, "messages": QUESTION, "max_tokens": 2}
    for stream in (False, True):
        answer = raw.create(**settings, stream=stream)
        assert answer.headers["x-paceline-draft-version"] == live
        list(answer.parse()) if stream else answer.parse()
    assert served.server.get("/v1/models").headers["x-paceline-draft-version"] == live


def test_usage_accounts_for_drafts_when_asked_and_only_then(served: Served) -> None:
    settings = {"model": served.model, "messages": QUESTION, "max_tokens": 12}
    client = served.openai.chat.completions
    options = {"include_usage": True, "continuous_usage_stats": True}
    for headers in (None, USAGE):
        whole = client.create(**settings, extra_headers=headers)
        chunks = list(
            client.create(**settings, stream=True, stream_options=options, extra_headers=headers)
        )
        early = [c.usage for c in chunks if c.choices]
        assert all("paceline" not in (usage.model_extra or {}) for usage in early)
        for usage in (whole.usage, chunks[-1].usage):
            if headers:
                check_account(usage, usage.completion_tokens)
            else:
                assert "paceline" not in (usage.model_extra or {})


def test_usage_of_completions_and_responses_accounts_for_drafts(served: Served) -> None:
    client = served.openai
    prompt = {"model": served.model, "prompt": "Once upon", "max_tokens": 8, "extra_headers": USAGE}
    check_account(client.completions.create(**prompt).usage, 8)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(**prompt, stream=True, stream_options=options))
    assert all("paceline" not in (c.usage.model_extra or {}) for c in chunks if c.choices)
    check_account(chunks[-1].usage, 8)
    ask = {
        "model": served.model, "input": "Hello", "max_output_tokens": 8, "extra_headers": USAGE,
    }  # fmt: skip
    whole = client.responses.create(**ask)
    check_account(whole.usage, whole.usage.output_tokens)
    last = list(client.responses.create(**ask, stream=True))[-1].response
    check_account(last.usage, last.usage.output_tokens)


def test_errors_have_the_shape_the_client_knows(served: Served) -> None:
    client = served.openai
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=served.model, messages=QUESTION, temperature=-1.0)
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=served.model, prompt=[5] * 2000, max_tokens=5)
    for failure in (missing, wrong, too_long):
        assert failure.value.body["message"]
        assert failure.value.body["code"] == failure.value.status_code
    assert client.chat.completions.create(
        model=served.model, messages=QUESTION, max_tokens=1
    ).choices  # fmt: skip
