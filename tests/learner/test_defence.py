"""Hidden states that the target did not make are refused by reason; its own never are."""

import json
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.batch import Span
from learner.defence import ALWAYS_ALLOWED, FEWEST_SPANS, WINDOW_SPANS, Defence, LearnedRange
from learner.target import Target
from rlcore.records.wire import RecordError
from tests.learner.tiny import HIDDEN, make_span, make_target


def sharp_target(folder, seed: int = 0):
    """A tiny target whose logits spread as a real one's do: logsumexps from 10 to 30."""
    model = make_target(folder, tied=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(1.6 * noise(model.lm_head.weight.shape, seed))
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return sharp_target(folder), Target.open(folder)


@pytest.fixture(scope="module")
def spans(model):
    return [make_span(model[0], 20 + i % 9, 4, first_position=i % 3, seed=i) for i in range(30)]


def refusal(defence: Defence, span: Span) -> str | None:
    try:
        defence.check(span)
    except RecordError as error:
        return error.reason
    return None


def noise(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[5, 3] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_targets_own_states_pass_in_any_serving_dtype(model, spans, dtype):
    defence = Defence(model[1], 0)
    for span in spans:
        own = replace(span, aux=span.aux.to(dtype), last=span.last.to(dtype))
        assert refusal(defence, own) is None
        assert refusal(Defence(model[1], 1), replace(own, aux=None)) is None


POISON = {
    "NaN in last": ("not_finite", lambda s: replace(s, last=with_value(s.last, torch.nan))),
    "infinity in last": ("not_finite", lambda s: replace(s, last=with_value(s.last, torch.inf))),
    "NaN in aux": ("not_finite", lambda s: replace(s, aux=with_value(s.aux, torch.nan))),
    "infinity in aux": ("not_finite", lambda s: replace(s, aux=with_value(s.aux, -torch.inf))),
    "infinite logsumexp": ("not_finite", lambda s: replace(s, lse=torch.full_like(s.lse, torch.inf))),
    "one huge value in aux": ("extreme", lambda s: replace(s, aux=with_value(s.aux, 1e30))),
    "last too large for its norm": ("extreme", lambda s: replace(s, last=s.last * 3)),
    "last is zero": ("extreme", lambda s: replace(s, last=torch.zeros_like(s.last))),
    "aux is zero": ("extreme", lambda s: replace(s, aux=torch.zeros_like(s.aux))),
    "aux is beyond any residual": ("extreme", lambda s: replace(s, aux=s.aux * 1e6)),
    "many aux rows far above the others": (
        "extreme",
        lambda s: replace(s, aux=torch.where(torch.arange(s.rows)[:, None] % 6 == 1, 1e3, 1) * s.aux),
    ),
    "made-up last": ("logsumexp", lambda s: replace(s, last=noise(s.last.shape, 0))),
    "last of other rows": ("logsumexp", lambda s: replace(s, last=s.last.roll(5, 0))),
    "made-up logsumexp": ("logsumexp", lambda s: replace(s, lse=torch.ones_like(s.lse))),
    "logsumexp below the largest logit": ("logsumexp", lambda s: replace(s, lse=s.lse - 2)),
    "no logsumexp": ("logsumexp", lambda s: replace(s, lse=torch.full_like(s.lse, torch.nan))),
}  # fmt: skip


@pytest.mark.parametrize("name", POISON)
def test_poison_is_refused_from_the_first_span_on(model, spans, name):
    reason, poison = POISON[name]
    defence = Defence(model[1], 0)
    for span in spans:
        assert refusal(defence, poison(span)) == reason
        assert refusal(defence, span) is None


def test_states_of_another_model_are_refused(model, tmp_path):
    other = sharp_target(tmp_path, seed=1)
    defence = Defence(model[1], 0)
    for i in range(30):
        assert refusal(defence, make_span(other, 30, 4, seed=i)) == "logsumexp"


@pytest.mark.parametrize("factor", [0.05, 20.0])
def test_a_size_unlike_the_streams_is_refused_once_the_stream_is_known(model, spans, factor):
    defence = Defence(model[1], 0)
    odd = replace(spans[-1], aux=spans[-1].aux * factor)
    assert refusal(defence, odd) is None
    for span in spans[:-1]:
        assert refusal(defence, span) is None
    assert refusal(defence, odd) == "extreme"
    assert refusal(defence, replace(odd, aux=spans[-1].aux * 1.5)) is None


def test_an_attention_sink_is_no_poison(model, spans):
    defence = Defence(model[1], 0)
    for span in spans:
        aux = span.aux.clone()
        aux[0] *= 2000
        assert refusal(defence, replace(span, aux=aux)) is None


def test_one_layer_alone_gives_it_away(model, spans):
    defence = Defence(model[1], 0)
    for span in spans:
        defence.check(span)
    aux = spans[0].aux.clone()
    aux[:, HIDDEN : 2 * HIDDEN] *= 20
    with pytest.raises(RecordError, match=r"in aux1$"):
        defence.check(replace(spans[0], aux=aux))


def test_what_was_learned_survives_a_restart(model, spans):
    defence, again = Defence(model[1], 0), Defence(model[1], 0)
    for span in spans:
        defence.check(span)
    again.load_state(json.loads(json.dumps(defence.state())))
    assert again.state() == defence.state()
    assert refusal(again, replace(spans[0], aux=spans[0].aux * 20)) == "extreme"


positive = st.floats(1e-6, 1e9)


@settings(max_examples=50, deadline=None)
@given(st.lists(positive, max_size=60), positive)
def test_a_value_near_the_median_is_always_inside(values, value):
    learned = LearnedRange()
    for one in values:
        learned.observe(one)
    logs = sorted(learned.state())
    if len(logs) < FEWEST_SPANS or abs(torch.tensor(value).log() - logs[len(logs) // 2]) < (
        ALWAYS_ALLOWED - 1e-3
    ):
        assert learned.observe(value)


@settings(max_examples=20, deadline=None)
@given(st.floats(1, 1000), st.integers(0, WINDOW_SPANS // 2 - 2), st.integers(0, 9))
def test_less_than_half_of_the_window_cannot_shift_the_range(size, bad, seed):
    draw = random.Random(seed)
    good = [size * draw.uniform(0.8, 1.2) for _ in range(WINDOW_SPANS - bad)]
    values = good + [1e6 * size] * bad
    draw.shuffle(values)
    learned = LearnedRange()
    for value in values:
        learned.observe(value)
    assert learned.observe(size)


def test_a_range_learned_from_a_bad_start_does_not_lock_the_good_out():
    learned = LearnedRange()
    for _ in range(40):
        learned.observe(1000.0)
    inside = [learned.observe(1.0) for _ in range(100)]
    assert not inside[0]
    assert all(inside[45:])
