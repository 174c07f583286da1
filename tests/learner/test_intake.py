"""Poison is refused by reason at the intake, its budget holds, and a restart loses nothing."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import learner.journal as journal_module
from learner.batch import Span
from learner.inbox import Inbox
from learner.intake import Intake
from learner.target import Target
from rlcore.records.wire import RecordError, encode
from rlcore.settings import DrafterSettings
from rlcore.transport import learner_endpoints, open_socket
from tests.learner.tiny import HIDDEN, VOCAB, make_span, make_target, make_trace


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder), Target.open(folder)


@pytest.fixture(scope="module")
def spans(model):
    """A third of them held out early on."""
    return [
        replace(
            make_span(model[0], 12 + i % 5, 4, seed=i),
            prompt_hash=("0" if i % 3 == 0 else "f") * 32,
            tenant="ab"[i % 7 == 0],
        )
        for i in range(60)
    ]


def intake(target: Target, folder: Path | None = None, gib: float = 0.001) -> Intake:
    found = Intake(DrafterSettings(replay_gib=gib, gate_tokens=100), folder, target)
    found.aux_count = 3
    return found


def refusal(taker: Intake, span: Span, **fields: object) -> str | None:
    try:
        taker.put(*make_trace(span, **fields))
    except RecordError as error:
        return error.reason
    return None


def changed(span: Span, name: str, value: float) -> Span:
    tensor = getattr(span, name).clone()
    tensor[-1] = value
    return replace(span, **{name: tensor})


POISON: dict[str, tuple[str, Callable[[Span], Span], dict[str, object]]] = {
    "of another target version": ("target_version", lambda s: s, {"target_version": 1}),
    "without a prompt's hash": ("malformed", lambda s: s, {"prompt_hash": "no number"}),
    "of a wider model": ("tensors", lambda s: replace(s, last=torch.zeros(s.rows, HIDDEN + 1)), {}),
    "without auxiliary states": ("tensors", lambda s: replace(s, aux=None), {}),
    "with a token outside the vocabulary": (
        "tokens",
        lambda s: replace(s, token_ids=torch.full_like(s.token_ids, VOCAB)),
        {},
    ),
    "with NaN": ("not_finite", lambda s: changed(s, "aux", torch.nan), {}),
    "with infinity": ("not_finite", lambda s: changed(s, "last", torch.inf), {}),
    "with extreme states": ("extreme", lambda s: changed(s, "aux", 1e20), {}),
    "with made-up states": ("logsumexp", lambda s: replace(s, lse=s.lse + 3), {}),
    "with nothing to draft from": ("nothing_new", lambda s: s, {"prompt_length": 99}),
}


@pytest.mark.parametrize("name", POISON)
def test_a_span_is_refused_that_is(model, spans, name):
    reason, poison, fields = POISON[name]
    taker = intake(model[1])
    for span in spans[:10]:
        assert refusal(taker, poison(span), **fields) == reason
        assert taker.replay.training_tokens == taker.replay.heldout_tokens == taker.received == 0
    for span in spans[:10]:
        assert refusal(taker, span) is None
        assert refusal(taker, span) == "nothing_new"
    assert taker.received == 10


def test_a_flood_is_refused_by_the_tenants_share_and_not_counted(model, spans):
    taker = intake(model[1], gib=0.1)
    reasons: Counter[str | None] = Counter()
    with mock.patch("learner.tenant_share.HORIZON_TOKENS", 1000):
        for i in range(1500):
            tenant = "honest" if i % 11 == 0 else "flood"
            one = replace(spans[1], request_id=f"{tenant}{i}", tenant=tenant)
            reason = refusal(taker, one)
            assert reason in ((None, "tenant_share") if tenant == "flood" else (None,))
            reasons[reason] += 1
    assert reasons["tenant_share"] > 800
    assert taker.received == reasons[None]
    assert taker.training_tokens == reasons[None] * spans[1].anchors


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.integers(0, 59), st.sampled_from([None, *POISON]), st.sampled_from("xyz")),
        max_size=60,
    ),
    st.integers(4, 60),
)
def test_whatever_comes_budget_and_counters_hold(model, spans, what, kib):
    taker = intake(model[1], gib=kib / 2**20)
    taken: dict[str, Span] = {}
    trained = 0
    for number, poison, tenant in what:
        span = replace(spans[number], tenant=tenant)
        reason, spoil, fields = POISON[poison] if poison else (None, lambda s: s, {})
        result = refusal(taker, spoil(span), **fields)
        if poison:
            assert result == reason or (result == "nothing_new" and span.request_id in taken)
        elif result is None:
            taken[span.request_id] = span
            trained += 0 if taker.replay.holds_out(span) else span.anchors
        assert taker.received >= len(taken)
    assert taker.training_tokens == trained
    held = taker.replay.heldout() + taker.replay.draw(10**9)
    assert {s.request_id for s in held} <= taken.keys()
    assert sum(s.nbytes for s in held) <= kib * 1024 or len(held) <= 2


# --- through a restart ---


class Senders:
    """A real inbox, and something that sends traces to it."""

    def __init__(self, folder: Path) -> None:
        base = f"ipc://{folder}/s"
        self.inbox = Inbox(base)
        self._context: zmq.Context = zmq.Context()
        self._push = open_socket(self._context, zmq.PUSH, learner_endpoints(base)[0], bind=False)

    def send(self, taker: Intake, spans: list[Span], seen: Callable[[Span], None]) -> None:
        for span in spans:
            trace, frames = make_trace(span)
            self._push.send_multipart([encode(trace), *frames])
            self.inbox.wait(5000)
            assert taker.take(self.inbox, seen)

    def close(self) -> None:
        self.inbox.close()
        self._context.destroy(linger=0)


@pytest.fixture
def senders(tmp_path):
    found = Senders(tmp_path)
    yield found
    found.close()


def ignore(span: Span) -> None:
    pass


def draws(taker: Intake) -> list[str]:
    return [s.request_id for _ in range(20) for s in taker.replay.draw(30)]


@pytest.mark.parametrize("kib", [60, 1000])
def test_after_a_restart_it_draws_and_judges_the_same(model, spans, senders, tmp_path, kib):
    with mock.patch.object(journal_module, "SEGMENT_BYTES", 20_000):
        before = intake(model[1], tmp_path, gib=kib / 2**20)
        senders.send(before, spans[:30], ignore)
        draws(before)
        senders.send(before, spans[30:], ignore)
        before.close()
    assert (before.replay.training_tokens < before.training_tokens) == (kib == 60)
    after = intake(model[1], tmp_path, gib=kib / 2**20)
    after.load_state(json.loads(json.dumps(before.state())))
    seen: list[Span] = []
    after.reload(senders.inbox, seen.append)
    assert seen == []
    assert senders.inbox.rejected == {}
    assert (after.received, after.training_tokens) == (before.received, before.training_tokens)
    assert draws(after) == draws(before)
    for name in ("heldout_tokens", "training_tokens"):
        assert getattr(after.replay, name) == getattr(before.replay, name)
    ids = [[s.request_id for s in taker.replay.heldout()] for taker in (before, after)]
    assert ids[0] == ids[1]


def test_what_came_after_the_last_checkpoint_is_counted_after_a_crash(
    model, spans, senders, tmp_path
):
    before = intake(model[1], tmp_path)
    senders.send(before, spans[:20], ignore)
    state = json.loads(json.dumps(before.state()))
    seen: list[Span] = []
    senders.send(before, spans[20:], seen.append)
    after = intake(model[1], tmp_path)
    after.load_state(state)
    again: list[Span] = []
    after.reload(senders.inbox, again.append)
    assert [s.request_id for s in again] == [s.request_id for s in seen]
    assert (after.received, after.training_tokens) == (before.received, before.training_tokens)
    assert after.replay.heldout_tokens == before.replay.heldout_tokens


def test_without_a_checkpoint_the_journal_alone_brings_everything_back(
    model, spans, senders, tmp_path
):
    before = intake(model[1], tmp_path)
    senders.send(before, spans, ignore)
    after = intake(model[1], tmp_path)
    after.reload(senders.inbox, ignore)
    assert (after.received, after.training_tokens) == (before.received, before.training_tokens)
    assert after.replay.training_tokens == before.replay.training_tokens
    assert after.replay.heldout_tokens == before.replay.heldout_tokens


def test_refused_traces_are_counted_and_not_kept(model, spans, senders, tmp_path):
    taker = intake(model[1], tmp_path)
    bad = changed(spans[2], "last", torch.nan)
    senders.send(taker, [spans[1], bad, replace(spans[3], lse=spans[3].lse + 3)], ignore)
    assert senders.inbox.rejected == {"not_finite": 1, "logsumexp": 1}
    again = intake(model[1], tmp_path)
    again.reload(senders.inbox, ignore)
    assert again.received == 1
