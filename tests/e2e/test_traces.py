"""A request's traces, put together, are the token ids that its API response returned."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from learner.target import Target
from rlcore.records.trace import VerifyStep, check_trace
from tests.conftest import SPAN_TOKENS, Served
from tests.e2e.tap import Captured

torch.set_num_threads(1)

pytestmark = pytest.mark.slow
on_eagle3 = pytest.mark.on_server("eagle3")
on_draft_model = pytest.mark.on_server("draft_model")
on_both = pytest.mark.on_server("eagle3", "draft_model")

STORY = "Once upon a time there was a little girl who lived near the sea."
CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Rome"]}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def ids_of(choice: Any) -> list[int]:
    ids: list[int] = choice.model_extra["token_ids"]
    return ids


def complete(served: Served, prompt: str | list[int] = STORY, **settings: Any) -> Any:
    settings = {"max_tokens": 24, "temperature": 0.0, **settings}
    extra = {"return_token_ids": True, **settings.pop("extra_body", {})}
    return served.openai.completions.create(
        model=served.model, prompt=prompt, extra_body=extra, **settings
    )


def joined(spans: list[Captured]) -> list[int]:
    """What the spans of one request emitted, every trace checked, its place in the request too."""
    end = None
    for index, captured in enumerate(spans):
        trace = captured.trace
        check_trace(trace)
        assert trace.tenant == "default"
        assert trace.span_index == index
        assert trace.final == (index == len(spans) - 1)
        assert end is None or trace.first_position == end
        end = trace.first_position + captured.span.rows
    return [token for captured in spans for token in captured.trace.emitted_ids()]


def steps_of(served: Served, answer: Any) -> list[VerifyStep]:
    spans = served.tap.of_response(answer.id, len(ids_of(answer.choices[0])))
    return [step for captured in spans for step in captured.trace.steps]


def check_equal(served: Served, answer: Any) -> list[Captured]:
    """Of an answer with one choice; its spans."""
    (choice,) = answer.choices
    spans = served.tap.of_response(answer.id, len(ids_of(choice)))
    assert joined(spans) == ids_of(choice)
    return spans


def inside_a_step(served: Served, answer: Any) -> list[int]:
    """Indices of emitted tokens behind which the same step emitted more."""
    start = len(answer.choices[0].model_extra["prompt_token_ids"])
    return [
        step.position - start + i
        for step in steps_of(served, answer)
        for i in range(step.accepted)
    ]  # fmt: skip


def text_of(served: Served, ids: list[int]) -> str:
    text: str = served.server.post(
        "/detokenize", {"model": served.model, "tokens": ids}
    ).json()["prompt"]  # fmt: skip
    return text


@on_both
def test_a_whole_answer_equals_its_traces(served: Served) -> None:
    answer = complete(served)
    spans = check_equal(served, answer)
    first = spans[0].trace
    prompt = answer.choices[0].model_extra["prompt_token_ids"]
    assert first.prompt_length == len(prompt)
    assert first.token_ids[: len(prompt) - first.first_position] == prompt[first.first_position :]


@on_both
def test_a_sampled_streamed_chat_equals_its_traces(served: Served) -> None:
    chunks = list(
        served.openai.chat.completions.create(
            model=served.model, messages=[{"role": "user", "content": "Tell me about birds."}],
            max_tokens=30, temperature=0.8, top_p=0.9, seed=11, stream=True,
            extra_body={"return_token_ids": True},
        )
    )  # fmt: skip
    ids = [
        t for c in chunks for choice in c.choices for t in choice.model_extra.get("token_ids") or []
    ]
    spans = served.tap.of_response(chunks[0].id, len(ids))
    assert joined(spans) == ids
    assert ids
    sampling = spans[0].trace.sampling
    assert (sampling.temperature, sampling.top_p) == (pytest.approx(0.8), pytest.approx(0.9))


@on_draft_model
def test_a_stop_string_in_the_middle_of_a_step_cuts_the_traces(served: Served) -> None:
    free = complete(served, max_tokens=60)
    ids = ids_of(free.choices[0])
    cut = 0
    for index in inside_a_step(served, free):
        before, upto = text_of(served, ids[:index]), text_of(served, ids[: index + 1])
        word = upto[len(before) :]
        if len(word.strip()) < 2 or word in before:
            continue
        for stream in (False, True):
            answer = complete(served, max_tokens=60, stop=[word], stream=stream)
            if stream:
                chunks = [c for c in answer if c.choices]
                got = [t for c in chunks for t in ids_of(c.choices[0])]
                reason, name = chunks[-1].choices[0].finish_reason, chunks[0].id
            else:
                got = ids_of(answer.choices[0])
                reason, name = answer.choices[0].finish_reason, answer.id
            assert reason == "stop"
            assert got == ids[: index + 1]
            assert joined(served.tap.of_response(name, len(got))) == got
        cut += 1
        if cut == 2:
            break
    assert cut, "no step emitted a word that could be stopped at"


@on_draft_model
def test_max_tokens_in_the_middle_of_a_step_cuts_the_traces(served: Served) -> None:
    free = complete(served, max_tokens=60)
    ids = ids_of(free.choices[0])
    places = inside_a_step(served, free)
    assert places
    for index in places[:3]:
        answer = complete(served, max_tokens=index + 1)
        assert ids_of(answer.choices[0]) == ids[: index + 1]
        check_equal(served, answer)


@on_draft_model
def test_a_stop_token_in_the_middle_of_a_step_cuts_the_traces(served: Served) -> None:
    free = complete(served, max_tokens=60)
    ids = ids_of(free.choices[0])
    index = next(i for i in inside_a_step(served, free) if ids[i] not in ids[:i])
    answer = complete(served, max_tokens=60, extra_body={"stop_token_ids": [ids[index]]})
    assert answer.choices[0].finish_reason == "stop"
    assert ids_of(answer.choices[0]) == ids[: index + 1]
    check_equal(served, answer)


@on_both
def test_a_single_token_is_a_trace_of_its_own(served: Served) -> None:
    check_equal(served, complete(served, max_tokens=1))


@on_both
def test_each_of_two_choices_has_traces_of_its_own(served: Served) -> None:
    answer = complete(served, n=2, temperature=1.0, seed=7, max_tokens=20)
    total = sum(len(ids_of(choice)) for choice in answer.choices)
    requests = served.tap.by_request(answer.id, total)
    assert len(requests) == 2
    assert sorted(joined(spans) for spans in requests.values()) == sorted(
        ids_of(choice) for choice in answer.choices
    )


@on_both
def test_spans_start_behind_a_prefix_cache_hit_at_their_absolute_positions(served: Served) -> None:
    prompt = [1000 + 7 * i for i in range(450)]
    first, second = (complete(served, prompt, max_tokens=10) for _ in range(2))
    whole, cached = check_equal(served, first), check_equal(served, second)
    assert whole[0].trace.first_position == 0
    start = cached[0].trace.first_position
    assert start > 0
    assert cached[0].trace.token_ids[: len(prompt) - start] == prompt[start:]
    assert cached[0].trace.prompt_hash == whole[0].trace.prompt_hash
    assert cached[0].tensor("last").shape[0] == whole[0].tensor("last").shape[0] - start


@on_both
def test_a_client_that_goes_away_leaves_traces_of_what_it_could_have_had(served: Served) -> None:
    body = {
        "model": served.model, "prompt": STORY, "max_tokens": 600, "temperature": 0.0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    got: list[int] = []
    url = f"{served.server.openai_url}/completions"
    with (
        httpx.Client(timeout=60, trust_env=False) as client,
        client.stream("POST", url, json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                got += event["choices"][0]["token_ids"] or []
                if len(got) >= 12:
                    break
    spans = served.tap.of_response(event["id"], len(got))
    emitted = joined(spans)
    assert emitted[: len(got)] == got
    assert len(emitted) < 600
    again = complete(served, max_tokens=len(emitted), extra_body={"ignore_eos": True})
    assert ids_of(again.choices[0]) == emitted


@on_draft_model
def test_long_answers_are_cut_into_spans_that_follow_each_other(served: Served) -> None:
    most = SPAN_TOKENS["draft_model"]
    answer = complete(served, max_tokens=3 * most, extra_body={"ignore_eos": True})
    spans = check_equal(served, answer)
    assert len(spans) >= 3
    for before, after in itertools.pairwise(spans):
        rows = before.span.rows
        assert most <= rows <= most + 4
        assert after.trace.token_ids[0] == before.trace.token_ids[rows]


@on_both
def test_structured_output_equals_its_traces_and_is_marked(served: Served) -> None:
    answer = served.openai.chat.completions.create(
        model=served.model, messages=[{"role": "user", "content": "A city as JSON."}],
        max_tokens=60, temperature=0.0, extra_body={"return_token_ids": True},
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}},
    )  # fmt: skip
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "size"}
    spans = check_equal(served, answer)
    assert all(captured.trace.grammar for captured in spans)
    assert not check_equal(served, complete(served, max_tokens=3))[0].trace.grammar


@on_draft_model
def test_no_position_is_captured_twice_when_requests_are_preempted(served: Served) -> None:
    before = preemptions(served)
    prompts = [[2000 + 31 * i + 3 * j for j in range(100)] for i in range(9)]

    def ask(prompt: list[int]) -> Any:
        return complete(served, prompt, max_tokens=60, extra_body={"ignore_eos": True})

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts, timeout=240))
    assert preemptions(served) > before
    for answer in answers:
        assert len(ids_of(answer.choices[0])) == 60
        check_equal(served, answer)


def preemptions(served: Served) -> float:
    lines = served.server.get("/metrics").text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:num_preemptions_total")
    )


@on_both
def test_captured_states_reproduce_what_the_target_computed(served: Served) -> None:
    head = Target.open(served.target).lm_head
    greedy = complete(served, max_tokens=40)
    sampled = complete(served, max_tokens=40, temperature=0.9, seed=2)
    compared = 0
    for answer in (greedy, sampled):
        for captured in check_equal(served, answer):
            trace = captured.trace
            logits = captured.tensor("last") @ head.T
            whole = logits.logsumexp(-1)
            recorded = captured.tensor("logsumexp")
            known = ~recorded.isnan()
            torch.testing.assert_close(recorded[known], whole[known], rtol=0, atol=1e-3)
            for step in trace.steps:
                row = step.position - 1 - trace.first_position
                for i, (logprob, lse) in enumerate(
                    zip(step.draft_logprobs, step.logsumexp, strict=True)
                ):
                    if row + i >= 0:
                        expected = float(logits[row + i, step.draft_ids[i]] - whole[row + i])
                        assert logprob == pytest.approx(expected, abs=1e-3)
                        assert lse == pytest.approx(float(whole[row + i]), abs=1e-3)
                        compared += 1
                if answer is greedy and row >= 0:
                    emitted = [*step.draft_ids[: step.accepted], step.replacement]
                    best = logits[row : row + len(emitted)].argmax(-1).tolist()
                    assert emitted == best
    assert compared >= 40
