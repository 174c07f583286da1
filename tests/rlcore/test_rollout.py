"""A rollout is taken exactly when its streams belong together."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.records.trace import Sampling
from rlcore.records.wire import RecordError
from rlcore.rollout import NOT_SAMPLED, Rollout, check_rollout, equal_rewards


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=5))
    mask = draw(st.lists(st.booleans(), max_size=8))
    n = len(prompt)
    logprob = st.floats(-50, 0)
    return Rollout(
        rollout_id="0.0",
        task_id="task",
        group_id="0",
        token_ids=prompt
        + draw(st.lists(st.integers(0, 99), min_size=len(mask), max_size=len(mask))),
        prompt_length=n,
        loss_mask=[False] * n + mask,
        logprobs=[0.0] * n + [draw(logprob) if m else 0.0 for m in mask],
        policy_versions=[NOT_SAMPLED] * n
        + [draw(st.integers(0, 9)) if m else NOT_SAMPLED for m in mask],
        sampling=Sampling(),
        draft_version=0,
        finish_reason="stop",
        reward=draw(st.floats(-10, 10)),
    )


def refused(rollout: Rollout, **changed: object) -> None:
    with pytest.raises(RecordError):
        check_rollout(msgspec.structs.replace(rollout, **changed))


@given(rollouts())
def test_what_belongs_together_is_taken_and_survives_json(rollout):
    assert check_rollout(rollout) is rollout
    again = msgspec.json.decode(msgspec.json.encode(rollout), type=Rollout)
    assert again == rollout


@given(rollouts())
def test_its_figures_are_those_of_the_sampled_tokens(rollout):
    versions = [v for v, m in zip(rollout.policy_versions, rollout.loss_mask, strict=True) if m]
    assert rollout.sampled == len(versions)
    assert rollout.oldest_version == min(versions, default=NOT_SAMPLED)
    assert rollout.newest_version == max(versions, default=NOT_SAMPLED)


@given(rollouts(), st.sampled_from(["loss_mask", "logprobs", "policy_versions"]), st.booleans())
def test_a_stream_of_another_length_is_refused(rollout, stream, longer):
    values = list(getattr(rollout, stream))
    refused(rollout, **{stream: [*values, values[-1]] if longer else values[:-1]})


@given(rollouts())
def test_a_prompt_that_is_empty_too_long_or_sampled_is_refused(rollout):
    refused(rollout, prompt_length=0)
    refused(rollout, prompt_length=len(rollout.token_ids) + 1)
    mask, versions = [True, *rollout.loss_mask[1:]], [0, *rollout.policy_versions[1:]]
    refused(rollout, loss_mask=mask, policy_versions=versions)


@given(rollouts(), st.data())
def test_a_token_whose_mask_and_version_disagree_is_refused(rollout, data):
    at = data.draw(st.integers(0, len(rollout.token_ids) - 1))
    versions = list(rollout.policy_versions)
    versions[at] = 0 if versions[at] == NOT_SAMPLED else NOT_SAMPLED
    refused(rollout, policy_versions=versions)


@given(rollouts(), st.sampled_from([math.nan, math.inf, -math.inf, 1e-6, 3.0]), st.data())
def test_a_log_probability_that_is_none_is_refused(rollout, value, data):
    sampled = [i for i, m in enumerate(rollout.loss_mask) if m]
    if not sampled:
        return
    logprobs = list(rollout.logprobs)
    logprobs[data.draw(st.sampled_from(sampled))] = value
    refused(rollout, logprobs=logprobs)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@given(rollouts())
def test_a_reward_that_is_not_finite_is_refused(reward, rollout):
    refused(rollout, reward=reward)


@given(rollouts(), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=8))
def test_a_group_is_equal_exactly_when_no_reward_differs_from_another(rollout, rewards):
    group = [msgspec.structs.replace(rollout, reward=reward) for reward in rewards]
    assert equal_rewards(group) == all(reward == rewards[0] for reward in rewards)
