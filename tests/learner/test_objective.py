import dataclasses
import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import Span, SpanBatch, collate
from learner.drafters.eagle3 import Eagle3
from learner.estimate import chain_lengths
from learner.objective import (
    DistillObjective,
    acceptance,
    expected_length,
    places,
    soft_cross_entropy,
    target_logprobs,
)
from learner.objectives.losses import CommittedTokens, ForwardKL
from learner.objectives.named import RECIPES, ObjectiveError, recipe
from learner.objectives.outcomes import OutcomeWeights, ServedBatch
from learner.target import Target
from rlcore.optim import MuonAdamW
from rlcore.records.trace import Sampling, VerifyStep, VerifyTrace
from rlcore.records.wire import RecordError, TensorSpec
from rlcore.trainer import Trainer
from tests.learner.tiny import HIDDEN, VOCAB, make_span, make_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder)
    return model, Target.open(folder)


def test_stored_logsumexp_gives_the_whole_vocabularys_probabilities():
    generator = torch.Generator().manual_seed(0)
    last, head = (torch.randn(n, 8, generator=generator) for n in (5, 20))
    whole = torch.log_softmax(last @ head.T, dim=-1)
    lse = torch.logsumexp(last @ head.T, dim=-1)
    rows = torch.tensor([1, 4, 17])
    torch.testing.assert_close(target_logprobs(last, head[rows], lse), whole[:, rows])
    unknown = target_logprobs(last, head[rows], torch.full((5,), torch.nan))
    torch.testing.assert_close(unknown.exp().sum(-1), torch.ones(5))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 2**31))
def test_soft_cross_entropy_has_the_value_and_gradient_of_its_formula(rows, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator, requires_grad=True)
    p = torch.rand(rows, vocab, generator=generator) / vocab
    weight = torch.rand(rows, generator=generator)
    plain = -((p * torch.log_softmax(logits, -1)).sum(-1) * weight).sum()
    (expected,) = torch.autograd.grad(plain, logits)
    loss = soft_cross_entropy(logits, p, weight)
    (got,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
def test_expected_length_counts_the_run_before_the_first_mismatch(rows):
    got = expected_length(torch.tensor(rows)).tolist()
    for row, length in zip(rows, got, strict=True):
        run = 0
        while run < 3 and row[run]:
            run += 1
        assert length == 1 + run


def test_a_match_estimates_acceptance_of_sampled_targets_without_bias():
    generator = torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(6, generator=generator), 0)
    emitted = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    for draft in range(6):
        rate = float((emitted == draft).float().mean())
        assert abs(rate - float(p[draft])) < 5 * math.sqrt(0.25 / 200_000)


def test_loss_does_not_depend_on_how_spans_are_batched(world):
    model, target = world
    head = Eagle3.build(target, vocab_size=40)
    objective = DistillObjective(target.lm_head[head.vocab], steps=3)
    spans = [
        make_span(model, 9, 3),
        make_span(model, 14, 6, seed=1),
        make_span(model, 7, 2, seed=2),
    ]
    together = objective(head, collate(spans, with_aux=True))
    apart = [objective(head, collate([span], with_aux=True)) for span in spans]
    assert together.weight == pytest.approx(sum(o.weight for o in apart))
    torch.testing.assert_close(together.loss_sum, sum(o.loss_sum for o in apart))
    for name, (total, count) in together.metrics.items():
        assert total == pytest.approx(sum(o.metrics[name][0] for o in apart), rel=1e-5)
        assert count == sum(o.metrics[name][1] for o in apart)


def test_the_loss_is_that_of_its_formula(world):
    model, target = world
    head = Eagle3.build(target, vocab_size=40)
    span = make_span(model, 9, 3)
    batch = collate([span], with_aux=True)
    expected, weight = 0.0, 0.0
    with torch.no_grad():
        unrolled = head.unroll(batch, 3)
    for j, hidden in enumerate(unrolled):
        for i, row in enumerate(batch.anchor_row.tolist()):
            if row + 1 + j < span.rows:
                p = torch.softmax(model.lm_head(span.last[row + 1 + j]), -1)[head.vocab]
                q = torch.log_softmax(head.logits(hidden[i]), -1)
                expected -= 0.5**j * float((p * q).sum().detach())
                weight += 0.5**j
    objective = DistillObjective(target.lm_head[head.vocab], steps=3, loss=ForwardKL(decay=0.5))
    output = objective(head, batch)
    assert float(output.loss_sum.detach()) == pytest.approx(expected, rel=1e-4)
    assert output.weight == pytest.approx(weight)


def test_training_counts_acceptance_as_judging_does(world):
    model, target = world
    head = Eagle3.build(target, vocab_size=40)
    batch = collate([make_span(model, 30, 3), make_span(model, 12, 5, seed=4)], with_aux=True)
    matches, mask = acceptance(head, batch, 3)
    alive = matches.float().cumprod(1)
    reached = torch.cat([torch.ones(len(matches), 1), alive[:, :2]], dim=1) * mask
    metrics = DistillObjective(target.lm_head[head.vocab], steps=3)(head, batch).metrics
    for j in range(3):
        assert metrics[f"accept_{j}"] == (float(alive[:, j].sum()), float(reached[:, j].sum()))


def mixed_steps(span: Span) -> tuple[VerifyStep, ...]:
    """Steps of three drafts that are accepted or not by turns."""
    ids, steps = span.token_ids.tolist(), []
    position = span.first_position + span.first_anchor + 2
    while position + 3 < len(ids):
        accepted = len(steps) % 4
        drafts = ids[position : position + 3]
        drafts[accepted:] = [(i + 1) % VOCAB for i in drafts[accepted:]]
        steps.append(VerifyStep(position, 0, drafts, accepted, ids[position + accepted]))
        position += accepted + 1
    return tuple(steps)


def test_every_objective_trains_on_served_spans_and_stays_finite(world):
    model, target = world
    span = make_span(model, 30, 3)
    span = dataclasses.replace(span, steps=mixed_steps(span))
    batch = ServedBatch.of(collate([span], with_aux=True), [span])
    for name, known in RECIPES.items():
        head = Eagle3.build(target, vocab_size=VOCAB)
        objective = DistillObjective(
            target.lm_head[head.vocab], steps=3, loss=known.loss, outcomes=known.outcomes
        )
        trainer = Trainer(
            head, objective, MuonAdamW(head.named_parameters(), muon_lr=0.01, adamw_lr=0.003)
        )
        losses = [trainer.update([batch]).loss for _ in range(15)]
        assert all(map(math.isfinite, losses)), name
        assert losses[-1] < losses[0], name


def test_an_unknown_objective_is_named_in_one_line_with_those_there_are():
    with pytest.raises(ObjectiveError, match="no objective named 'nonsense'; there are kl, "):
        recipe("nonsense")


def test_outcomes_move_the_loss_only_where_a_recipe_asks_for_them(world):
    model, target = world
    head = Eagle3.build(target, vocab_size=40)
    span = make_span(model, 20, 3)
    span = dataclasses.replace(span, steps=mixed_steps(span))
    plain = collate([span], with_aux=True)
    served = ServedBatch.of(plain, [span])
    rows = target.lm_head[head.vocab]

    def loss(batch: SpanBatch, outcomes: OutcomeWeights | None) -> float:
        output = DistillObjective(rows, steps=3, outcomes=outcomes)(head, batch)
        return float(output.loss_sum.detach()) / output.weight

    assert loss(served, None) == loss(plain, None)
    assert loss(plain, OutcomeWeights(rejected=2.0)) == loss(plain, None)
    assert loss(served, OutcomeWeights(rejected=2.0)) != pytest.approx(loss(plain, None), rel=1e-5)


def test_tokens_outside_the_draft_vocabulary_have_no_place_and_teach_nothing(world):
    model, target = world
    assert places(torch.tensor([2, 5, 9]), torch.tensor([5, 4, 9, 11, -1])).tolist() == [
        1, -1, 2, -1, -1,
    ]  # fmt: skip
    head = Eagle3.build(target, vocab_size=40)
    outside = sorted(set(range(VOCAB)) - set(head.vocab.tolist()))
    span = make_span(model, 20, 3)
    batch = collate(
        [dataclasses.replace(span, token_ids=torch.full_like(span.token_ids, outside[0]))],
        with_aux=True,
    )
    objective = DistillObjective(target.lm_head[head.vocab], steps=3, loss=CommittedTokens())
    assert objective(head, batch).weight == 0


def test_tokens_outside_the_draft_vocabulary_are_rejections(world):
    model, target = world
    head = Eagle3.build(target, vocab_size=40)
    span = make_span(model, 20, 3)
    outside = sorted(set(range(VOCAB)) - set(head.vocab.tolist()))
    tokens = torch.full_like(span.token_ids, outside[0])
    (lengths,) = chain_lengths(head, [dataclasses.replace(span, token_ids=tokens)], 3)
    assert lengths.length_sum == lengths.anchors == lengths.steps > 0
    assert lengths.accepted == (0, 0, 0)


def test_training_lowers_the_loss_and_lengthens_the_drafts(world):
    model, target = world
    head = Eagle3.build(target, vocab_size=VOCAB)
    tokens = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        for _ in range(60):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    span = dataclasses.replace(make_span(model, 62, 3), token_ids=tokens[0])
    states = model.model(tokens[:, :62], output_hidden_states=True)
    last = states.last_hidden_state[0].detach()
    aux = torch.cat([states.hidden_states[i][0].detach() for i in (2, 3, 3)], dim=-1)
    span = dataclasses.replace(
        span, last=last, aux=aux, lse=model.lm_head(last).logsumexp(-1).detach()
    )
    trainer = Trainer(
        head,
        DistillObjective(target.lm_head[head.vocab], steps=3),
        MuonAdamW(head.named_parameters(), muon_lr=0.02, adamw_lr=0.01),
    )
    before = chain_lengths(head, [span], 3)[0].length_sum
    batch = collate([span], with_aux=True)
    losses = [trainer.update([batch]).loss for _ in range(40)]
    assert losses[-1] < losses[0]
    assert chain_lengths(head, [span], 3)[0].length_sum > before


def trace_of(frames: dict[str, torch.Tensor], tokens: int) -> tuple[VerifyTrace, list[memoryview]]:
    specs = [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in frames.items()
    ]
    trace = VerifyTrace(
        request_id="r", tenant="t", target_version=0, span_index=0, final=True, first_position=16,
        prompt_length=18, prompt_hash="h", token_ids=list(range(tokens)), sampling=Sampling(),
        grammar=False, steps=[], tensors=specs,
    )  # fmt: skip
    views = [memoryview(t.view(torch.uint8).numpy()).cast("B") for t in frames.values()]
    return msgspec.msgpack.decode(msgspec.msgpack.encode(trace), type=VerifyTrace), views


def test_a_span_views_writable_frames_and_copies_read_only_ones():
    last = torch.randn(4, HIDDEN).bfloat16()
    trace, views = trace_of({"last": last}, tokens=5)
    viewed = Span.from_trace(trace, views)
    copied = Span.from_trace(trace, [view.tobytes() for view in views])
    assert torch.equal(viewed.last, last)
    assert torch.equal(copied.last, last)
    last[0, 0] = 7.0
    assert viewed.last[0, 0] == 7.0
    assert viewed.lse.isnan().all()
    assert (viewed.first_anchor, viewed.anchors) == (1, 2)


def test_a_row_without_a_next_token_is_left_out():
    trace, views = trace_of({"last": torch.randn(5, HIDDEN)}, tokens=5)
    span = Span.from_trace(trace, views)
    assert span.rows == 4
    assert len(span.token_ids) == 5


def test_spans_that_do_not_fit_the_target_are_refused():
    trace, views = trace_of({"last": torch.randn(4, HIDDEN)}, tokens=5)
    span = Span.from_trace(trace, views)
    span.check(vocab_size=VOCAB, hidden_size=HIDDEN, aux_size=None)
    for sizes in ({"vocab_size": 3}, {"hidden_size": 8}, {"aux_size": 3 * HIDDEN}):
        with pytest.raises(RecordError):
            span.check(**{"vocab_size": VOCAB, "hidden_size": HIDDEN, "aux_size": None} | sizes)
    with pytest.raises(RecordError):
        Span.from_trace(*trace_of({"aux": torch.randn(4, HIDDEN)}, tokens=5))
