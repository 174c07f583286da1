import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import Span, collate
from learner.objectives.outcomes import (
    ACCEPTED,
    REJECTED,
    UNKNOWN,
    OutcomeWeights,
    ServedBatch,
    collect_outcomes,
    nothing_served,
)
from rlcore.records.trace import Sampling, VerifyStep


def served_span(
    accepts: list[int], k: int, prompt: int = 4, first: int = 0, cut: int | None = None
) -> Span:
    """A span whose engine drafted ``k`` tokens a step and had ``accepts`` of them accepted; token i
    is i itself, a wrong draft is 1000 above it. ``cut`` leaves out the first steps, as if the
    request had begun in an earlier span."""
    steps, position = [], prompt + 1
    for accepted in accepts:
        drafts = [
            p if i < accepted else p + 1000 for i, p in enumerate(range(position, position + k))
        ]
        steps.append(VerifyStep(position, 0, drafts, accepted, position + accepted))
        position += accepted + 1
    rows = position - 1 - first
    return Span(
        token_ids=torch.arange(first, position), aux=torch.zeros(rows, 6), last=torch.zeros(rows, 2),
        lse=torch.zeros(rows), first_position=first, prompt_length=prompt, prompt_hash="h",
        steps=tuple(steps[cut:]), sampling=Sampling(), tenant="t", request_id="r",
    )  # fmt: skip


def test_outcomes_of_a_known_request():
    # Prompt 0..3, the target emitted 4. Step 1 drafts 5 6 7: 5 accepted, 6 not. Step 2 drafts 7 8 9,
    # all accepted, and 10 is the bonus. Step 3 drafts 11 12 13, none accepted.
    span = served_span([1, 3, 0], k=3)
    found = collect_outcomes([span])
    # Anchors are rows 3 .. 9 (the last token, 11, has no states); anchor t drafts token t + 2.
    assert found.drafted.tolist() == [3, 0, 3, 0, 0, 0, 3]
    assert found.accepted.tolist() == [1, 0, 3, 0, 0, 0, 0]
    assert found.rejected.tolist() == [1006, -1, -1, -1, -1, -1, 1011]
    assert found.passed.tolist() == [False, True, False, True, True, True, False]
    assert found.verdict.tolist() == [
        ACCEPTED, REJECTED, ACCEPTED, ACCEPTED, ACCEPTED, UNKNOWN, REJECTED,
    ]  # fmt: skip


steps = st.lists(st.integers(0, 3), min_size=2, max_size=12)


@settings(max_examples=50, deadline=None)
@given(st.lists(steps, min_size=1, max_size=3), st.integers(0, 4), st.integers(0, 2))
def test_what_was_accepted_and_rejected_is_counted_once(requests, first, cut):
    spans = [served_span(accepts, 3, first=min(first, 3), cut=cut) for accepts in requests]
    found = collect_outcomes(spans)
    batch = collate(spans, with_aux=True)
    assert len(found.verdict) == len(batch.anchor_row)
    position = batch.positions[batch.anchor_span] + batch.anchor_row + 2
    for i, (span, p) in enumerate(zip(batch.anchor_span.tolist(), position.tolist(), strict=True)):
        step = next((s for s in spans[span].steps if s.position == p), None)
        covering = next(
            (s for s in spans[span].steps if s.position <= p <= s.position + s.accepted), None
        )
        assert found.drafted[i] == (0 if step is None else 3)
        assert bool(found.passed[i]) == (covering is not None and step is None)
        verdict = UNKNOWN
        if covering is not None and p < covering.position + covering.accepted:
            verdict = ACCEPTED
        elif covering is not None and covering.accepted < 3:
            verdict = REJECTED
        assert found.verdict[i] == verdict


@settings(max_examples=50, deadline=None)
@given(st.lists(steps, min_size=1, max_size=3))
def test_every_draft_step_has_the_verdict_of_the_position_it_proposes(requests):
    spans = [served_span(accepts, 3) for accepts in requests]
    batch = collate(spans, with_aux=True)
    judged = torch.stack([batch.judged(j) for j in range(4)], dim=1)
    found = collect_outcomes(spans)
    by_position = {
        (int(span), int(row) + 2): int(v)
        for span, row, v in zip(batch.anchor_span, batch.anchor_row, found.verdict, strict=True)
    }
    verdicts = found.verdicts(judged)
    for i in range(len(verdicts)):
        for j in range(4):
            place = (int(batch.anchor_span[i]), int(batch.anchor_row[i]) + 2 + j)
            assert verdicts[i, j] == (by_position[place] if judged[i, j] else UNKNOWN)


@settings(max_examples=50, deadline=None)
@given(st.lists(steps, min_size=1, max_size=3), st.integers(0, 4), st.integers(0, 2))
def test_by_position_every_judged_draft_is_its_own_anchors_first(requests, first, cut):
    spans = [served_span(accepts, 3, first=min(first, 3), cut=cut) for accepts in requests]
    found = collect_outcomes(spans).by_position()
    batch = collate(spans, with_aux=True)
    position = (batch.positions[batch.anchor_span] + batch.anchor_row + 2).tolist()
    places = {place: i for i, place in enumerate(zip(batch.anchor_span.tolist(), position))}  # noqa: B905
    drafted, accepted, rejected = (torch.zeros(len(position), dtype=torch.long) for _ in range(3))
    rejected -= 1
    for number, span in enumerate(spans):
        for step in span.steps:
            for j, draft in enumerate(step.draft_ids[: step.accepted + 1]):
                if (number, step.position + j) in places:
                    at = places[number, step.position + j]
                    drafted[at] = 1
                    accepted[at] = j < step.accepted
                    rejected[at] = -1 if j < step.accepted else draft
    assert torch.equal(found.drafted, drafted)
    assert torch.equal(found.accepted, accepted)
    assert torch.equal(found.rejected, rejected)
    assert not found.passed.any()


def test_weights_multiply_position_anchor_and_what_lies_between():
    span = served_span([1, 3, 0], k=3)
    judged = torch.ones(7, 2, dtype=torch.bool)
    judged[-1, 1] = False
    weights = OutcomeWeights(rejected=3.0, accepted=0.5, passed=0.1, behind=0.2)
    got = weights.of(collect_outcomes([span]), judged)
    assert got[0].tolist() == pytest.approx([0.5, 3.0])
    assert got[1].tolist() == pytest.approx([0.3, 0.01])
    assert got[6].tolist() == pytest.approx([3.0, 0.2])


def test_plain_steps_say_nothing_of_the_drafter():
    span = served_span([0, 0, 0], k=3)
    plain = tuple(VerifyStep(s.position, 0, [], 0, s.replacement) for s in span.steps)
    span = dataclasses.replace(span, steps=plain)
    found = collect_outcomes([span])
    judged = torch.ones(span.anchors, 3, dtype=torch.bool)
    weights = OutcomeWeights(rejected=3.0, accepted=0.5, passed=0.1, behind=0.2)
    assert torch.equal(weights.of(found, judged), torch.ones(span.anchors, 3))
    assert (found.rejected == -1).all()
    assert not found.passed.any()
    unknown = nothing_served(span.anchors)
    for field in dataclasses.fields(found):
        assert torch.equal(getattr(found, field.name), getattr(unknown, field.name)), field.name


def test_a_served_batch_is_the_batch_with_its_outcomes():
    spans = [served_span([1, 2, 0], k=3), served_span([0, 3], k=3)]
    batch = collate(spans, with_aux=True)
    got = ServedBatch.of(batch, spans)
    assert torch.equal(got.token_ids, batch.token_ids)
    assert torch.equal(got.judged(1), batch.judged(1))
    assert torch.equal(got.outcomes.verdict, collect_outcomes(spans).verdict)


@pytest.mark.parametrize("missing", [1, 2, 3, 4, 5])
def test_a_step_that_reaches_past_the_spans_rows_leaves_the_next_span_alone(missing):
    whole = served_span([1, 3, 2], k=3)
    rows = whole.rows - missing
    short = dataclasses.replace(
        whole, token_ids=whole.token_ids[: rows + 1], aux=whole.aux[:rows], last=whole.last[:rows]
    )
    other = served_span([0, 0, 0, 2], k=3, cut=3)
    got, alone = collect_outcomes([short, other]), collect_outcomes([other])
    for field in dataclasses.fields(got):
        values = getattr(got, field.name)
        assert torch.equal(values[short.anchors :], getattr(alone, field.name)), field.name
        before = getattr(collect_outcomes([whole]), field.name)[: short.anchors]
        assert torch.equal(values[: short.anchors], before), field.name
