"""An episode is a chain of token ids: what was sampled stays as it was sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlcore.environments.host import EnvironmentHost
from rlcore.environments.worker_process import EnvironmentFailure
from rlcore.generator.base import Completion, GeneratorError
from rlcore.records.trace import Sampling
from rlcore.rl.episode import Limits, PromptTooLong, play
from rlcore.rollout import NOT_SAMPLED, Rollout

pytestmark = pytest.mark.slow

ECHO = "tests.rlcore.rl.scripted:Echo"
SAMPLING = Sampling(temperature=0.8)
ROOMY = Limits(prompt_tokens=400, sampled_tokens=200, turns=8, sequence_tokens=2048)


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model)


class Scripted:
    """Gives the listed replies one after the other; keeps what it was asked."""

    def __init__(self, tokenizer: Any, *replies: str | Completion | Exception) -> None:
        self._tokenizer = tokenizer
        self._replies = list(replies)
        self.asked: list[tuple[list[int], int]] = []

    async def __call__(self, token_ids: list[int], most: int) -> Completion:
        self.asked.append((list(token_ids), most))
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return said(self._tokenizer, reply, most) if isinstance(reply, str) else reply


def said(
    tokenizer: Any, text: str, most: int = 999, versions: list[int] | None = None
) -> Completion:
    """``text`` and the end of the turn, cut at ``most``."""
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    finish = "stop" if len(ids) <= most else "length"
    ids = ids[:most]
    return Completion(
        token_ids=ids,
        logprobs=[-0.01 * (i + 1) for i in range(len(ids))],
        policy_versions=versions or [2] * len(ids),
        finish_reason=finish,
        draft_version=len(ids),
    )


def hosted(spec: str, body: Callable[[EnvironmentHost], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with EnvironmentHost(spec, {}, 1, 20.0) as host:
            result = await body(host)
            assert host.running == 0, "every episode is ended"
            return result

    return asyncio.run(run())


def played(tokenizer: Any, complete: Scripted, limits: Limits = ROOMY, spec: str = ECHO) -> Rollout:
    async def body(host: EnvironmentHost) -> Rollout:
        task = await host.task("train", 3)
        return await play(task, "3.0", "3", host, tokenizer, complete, SAMPLING, limits)

    return hosted(spec, body)


def fails(tokenizer: Any, complete: Scripted, kind: type[Exception], limits: Limits = ROOMY) -> str:
    async def body(host: EnvironmentHost) -> str:
        task = await host.task("train", 3)
        with pytest.raises(kind) as error:
            await play(task, "3.0", "3", host, tokenizer, complete, SAMPLING, limits)
        return str(error.value)

    return hosted(ECHO, body)


def sampled_runs(rollout: Rollout) -> list[list[int]]:
    """The ids of each stretch of sampled tokens."""
    runs: list[list[int]] = []
    for i, sampled in enumerate(rollout.loss_mask):
        if sampled and (i == 0 or not rollout.loss_mask[i - 1]):
            runs.append([])
        if sampled:
            runs[-1].append(rollout.token_ids[i])
    return runs


def test_the_conversation_grows_by_what_was_sampled_and_what_was_said(tokenizer):
    complete = Scripted(tokenizer, "first try", "second", "stop, that is right")
    rollout = played(tokenizer, complete)
    messages = [
        {"role": "user", "content": "task 3"},
        {"role": "assistant", "content": "first try"},
        {"role": "user", "content": "you said first try"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "you said second"},
        {"role": "assistant", "content": "stop, that is right"},
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    text = tokenizer.decode(rollout.token_ids)
    assert whole.startswith(text)
    assert whole.removeprefix(text).strip() == ""
    assert [tokenizer.decode(run, skip_special_tokens=True) for run in sampled_runs(rollout)] == [
        "first try", "second", "stop, that is right",
    ]  # fmt: skip
    assert (rollout.reward, rollout.correct, rollout.reward_parts) == (1.0, True, {"turns": 3.0})
    assert (rollout.finish_reason, rollout.sampling) == ("stop", SAMPLING)


def test_each_request_is_a_prefix_of_the_rollout_and_the_budget_shrinks(tokenizer):
    complete = Scripted(tokenizer, "one", "two words", "stop")
    rollout = played(tokenizer, complete)
    left = ROOMY.sampled_tokens
    lengths = [len(run) for run in sampled_runs(rollout)]
    for (ids, most), length in zip(complete.asked, lengths, strict=True):
        assert ids == rollout.token_ids[: len(ids)]
        assert most == left
        left -= length
    assert len(complete.asked[0][0]) == rollout.prompt_length


def test_ids_that_decode_and_encode_to_others_are_kept(tokenizer):
    ids = [tokenizer.encode(c, add_special_tokens=False)[0] for c in "stop"]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
    odd = Completion(ids, [-1.0] * 4, [0] * 4, "stop", 0)
    assert sampled_runs(played(tokenizer, Scripted(tokenizer, odd))) == [ids]


def test_a_swap_in_the_middle_of_a_completion_is_seen_by_token(tokenizer):
    reply = said(tokenizer, "stop it here please")
    count = len(reply.token_ids)
    versions = [4] * 2 + [5] * (count - 2)
    rollout = played(
        tokenizer, Scripted(tokenizer, said(tokenizer, "stop it here please", versions=versions))
    )
    assert [v for v in rollout.policy_versions if v != NOT_SAMPLED] == versions
    assert (rollout.oldest_version, rollout.newest_version) == (4, 5)
    for i, sampled in enumerate(rollout.loss_mask):
        assert sampled == (rollout.policy_versions[i] != NOT_SAMPLED)
        assert (rollout.logprobs[i] < 0) == sampled
    assert rollout.draft_version == count


def test_a_prompt_that_is_too_long_is_not_sampled(tokenizer):
    complete = Scripted(tokenizer)
    text = fails(tokenizer, complete, PromptTooLong, Limits(3, 100, 1, 2048))
    assert "train/3" in text
    assert complete.asked == []


def test_a_prompt_that_fills_the_engine_is_not_sampled(tokenizer):
    opening = played(tokenizer, Scripted(tokenizer, "stop")).prompt_length
    complete = Scripted(tokenizer)
    fails(tokenizer, complete, PromptTooLong, Limits(400, 200, 8, opening))
    assert complete.asked == []


def test_an_empty_reply_is_one_token_that_ends_the_turn(tokenizer):
    rollout = played(tokenizer, Scripted(tokenizer, "", "stop"))
    assert next(len(run) for run in sampled_runs(rollout)) == 1
    assert rollout.reward_parts == {"turns": 2.0}


def test_no_token_at_all_is_a_rollout_that_sampled_nothing(tokenizer):
    nothing = Completion([], [], [], "length", 0)
    rollout = played(tokenizer, Scripted(tokenizer, nothing))
    assert (rollout.sampled, rollout.oldest_version) == (0, NOT_SAMPLED)
    assert rollout.finish_reason == "length"


def test_a_reply_that_is_cut_off_ends_the_episode(tokenizer):
    complete = Scripted(tokenizer, "one", "this is much too long to be said in what is left")
    rollout = played(tokenizer, complete, Limits(400, 6, 8, 2048))
    assert rollout.sampled == 6
    assert rollout.finish_reason == "length"
    assert rollout.loss_mask[-1], "nothing is said to a reply that was cut off"
    assert len(complete.asked) == 2


@pytest.mark.parametrize("room", [1, 3, 12, 30])
def test_an_episode_never_outgrows_the_engine(tokenizer, room):
    replies = ("one", "two", "three", "four")
    opening = played(tokenizer, Scripted(tokenizer, "stop")).prompt_length
    rollout = played(
        tokenizer, Scripted(tokenizer, *replies, "stop"), Limits(400, 200, 8, opening + room)
    )
    assert rollout.finish_reason == "length"
    assert rollout.sampled <= room


def test_the_last_turn_ends_the_episode(tokenizer):
    rollout = played(tokenizer, Scripted(tokenizer, "one", "two"), Limits(400, 100, 2, 2048))
    assert rollout.finish_reason == "turns"
    assert rollout.loss_mask[-1], "nothing is said to the last reply"
    assert rollout.reward_parts == {"turns": 2.0}


def test_a_failing_environment_or_generator_ends_the_episode(tokenizer):
    fails(tokenizer, Scripted(tokenizer, "one", "fault"), EnvironmentFailure)
    fails(tokenizer, Scripted(tokenizer, "one", GeneratorError("gone")), GeneratorError)


def test_a_cancelled_episode_is_ended(tokenizer):
    async def body(host: EnvironmentHost) -> None:
        started = asyncio.Event()

        async def never(_: list[int], __: int) -> Completion:
            started.set()
            await asyncio.Event().wait()
            raise AssertionError

        task = await host.task("train", 3)
        playing = asyncio.create_task(
            play(task, "3.0", "3", host, tokenizer, never, SAMPLING, ROOMY)
        )
        await started.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    hosted(ECHO, body)


def test_tools_are_used_over_several_turns(tokenizer):
    replies = [
        '<tool>{"name": "lookup", "input": "pear"}</tool>',
        '<tool>{"name": "calculator", "input": "2 * 3"}</tool>',
        "<answer>-1</answer>",
    ]
    rollout = played(tokenizer, Scripted(tokenizer, *replies), spec="tools")
    assert rollout.reward_parts["tool_calls"] == 2.0
    assert rollout.reward_parts["tool_faults"] == 0.0
    text = tokenizer.decode(rollout.token_ids[rollout.prompt_length :])
    assert "<result>6</result>" in text
    assert [
        tokenizer.decode(run, skip_special_tokens=True) for run in sampled_runs(rollout)
    ] == replies
