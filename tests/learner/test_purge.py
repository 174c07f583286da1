"""What is purged or too old is gone from memory and from the disk, stays gone, and nothing else goes."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.at_rest import NOTES, AtRest, note_recording
from learner.batch import Span
from learner.cutoffs import Cutoffs
from learner.inbox import Inbox
from learner.intake import Intake
from learner.journal import Journal
from learner.recording import Recorder, Recording, delete_from
from learner.replay import Replay
from learner.service import Learner
from learner.split import HeldoutSplit
from learner.strata import Bounds, Strata
from learner.target import Target
from learner.tenant_share import TenantShare
from learner.visits import fair_shares
from rlcore.records.learner_link import Purge, PurgeCounts, Purged, decode_learner_message
from rlcore.records.trace import Sampling, VerifyTrace
from rlcore.records.wire import RecordError, TensorSpec, encode
from rlcore.settings import DrafterSettings, LearnSettings
from rlcore.transport import learner_endpoints, open_socket
from tests.learner.made_spans import ALWAYS, NEVER, span
from tests.learner.tiny import make_span, make_target, make_trace


def message(number: int, tenant: str, ended: float = 100.0) -> list[bytes]:
    """A trace message; every byte of its tensor says whose it is."""
    trace = VerifyTrace(
        request_id=f"{tenant}{number}", tenant=tenant, target_version=0, span_index=0, final=True,
        first_position=0, prompt_length=1, prompt_hash="h", token_ids=[1, 2, 3],
        sampling=Sampling(), grammar=False, steps=[],
        tensors=[TensorSpec("last", "float32", (2, 2))], ended=ended,
    )  # fmt: skip
    return [encode(trace), tenant.encode() * 16]


def of(tenant: str) -> Callable[[VerifyTrace], bool]:
    return lambda trace: trace.tenant == tenant


# --- the journal ---


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(owners=st.lists(st.sampled_from("ab"), max_size=25), per_segment=st.integers(1, 6))
def test_the_journal_loses_the_tenants_messages_and_no_other_mark_changes(
    tmp_path_factory, owners, per_segment
):
    root = tmp_path_factory.mktemp("j")
    for start in range(0, len(owners), per_segment):
        part = Journal(root, 10**9)  # each opening begins a segment
        for i in range(start, min(start + per_segment, len(owners))):
            part.append(message(i, owners[i]))
        part.close()
    journal = Journal(root, 10**9)
    before = {trace.request_id: mark for mark, trace, _ in journal.read_marked()}
    end = journal.end
    assert journal.delete(of("a")) == owners.count("a")
    assert journal.delete(of("a")) == 0
    after = {trace.request_id: mark for mark, trace, _ in journal.read_marked()}
    assert after == {name: mark for name, mark in before.items() if name.startswith("b")}
    assert journal.end == end
    assert Journal(root, 10**9).end >= end
    assert b"a" * 16 not in b"".join(path.read_bytes() for path in root.iterdir())
    journal.append(message(99, "b"))
    assert [trace.request_id for trace, _ in journal.read()][-1] == "b99"


def test_a_deletion_that_a_crash_cut_short_leaves_no_copy(tmp_path):
    (tmp_path / "00000000.partial").write_bytes(b"a" * 16)
    Journal(tmp_path, 10**9)
    assert list(tmp_path.iterdir()) == []


# --- the replay ---


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([NEVER, ALWAYS, "8" * 32])), max_size=60
    ),
    st.integers(0, 2**31),
)
def test_the_replay_goes_on_as_if_the_tenant_had_never_been(come, seed):
    replay = Replay(40_000, HeldoutSplit(0.2, 50), 50, seed)
    for i, (tenant, prompt) in enumerate(come):
        replay.add(span(i, 4 + i % 9, prompt, tenant=tenant))
        replay.draw(20)
    held = [one for one in replay.heldout() if one.tenant != "a"]
    training, heldout = replay.remove(lambda one: one.tenant == "a")
    assert replay.remove(lambda one: one.tenant == "a") == (0, 0)
    assert replay.heldout() == held
    state = json.dumps(replay.state())
    assert all(f'"{i}"' not in state for i, (tenant, _) in enumerate(come) if tenant == "a")
    drawn = [one for _ in range(30) for one in replay.draw(50)]
    assert all(one.tenant != "a" for one in drawn)
    assert (replay.training_tokens > 0) == bool(drawn)
    for i in range(30):
        replay.add(span(f"later{i}", 8, tenant="bc"[i % 2]))
    assert replay.training_tokens + replay.heldout_tokens > 0
    assert training + heldout <= sum(tenant == "a" for tenant, _ in come)


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abc"), max_size=40), st.lists(st.sampled_from("bc"), max_size=40))
def test_old_spans_that_were_removed_do_not_come_up_when_room_is_needed(before, after):
    strata = Strata(Bounds(10**9, 60, 20, 0.5), 0)
    for i, tenant in enumerate(before):
        strata.add(span(i, 8, tenant=tenant))
    removed = strata.remove(lambda one: one.tenant == "a")
    assert len(removed) + len(strata) <= len(before)
    assert strata.tokens == sum(one.anchors for one in strata.spans())
    assert strata.nbytes == sum(one.nbytes for one in strata.spans())
    for i, tenant in enumerate(after):
        gone = strata.add(span(f"later{i}", 8, tenant=tenant)).gone
        assert all(one.tenant != "a" for one in gone)
    assert strata.tokens <= 60 + 6
    held = {part: sum(strata.tenant_tokens(part).values()) for part in ("recent", "old")}
    assert sum(held.values()) == strata.tokens


def test_a_purged_prompt_is_not_remembered_by_its_hash():
    split = HeldoutSplit(0.2, 50)
    replay = Replay(40_000, split, 50, 0)
    replay.add(span("x", 8, "1" * 32, tenant="a"))
    assert "1" * 32 in split.state()
    replay.remove(lambda one: one.tenant == "a")
    assert split.state() == {}


# --- the intake ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder), Target.open(folder)


@pytest.fixture(scope="module")
def spans(model) -> list[Span]:
    return [
        replace(
            make_span(model[0], 12, 4, seed=i),
            prompt_hash=("0" if i % 3 == 0 else "f") * 31 + f"{i:x}"[-1],
            tenant="ab"[i % 2],
            ended=100.0 + i,
        )
        for i in range(12)
    ]


def intake(target: Target, folder: Path | None) -> Intake:
    found = Intake(DrafterSettings(replay_gib=0.001, gate_tokens=100), folder, target)
    found.aux_count = 3
    return found


class Box:
    """The inbox, as far as a reload asks for it."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def reject(self, reason: str) -> None:
        self.reasons.append(reason)


def filled(target: Target, folder: Path, spans: list[Span]) -> Intake:
    taker = intake(target, folder)
    for one in spans:
        trace, tensors = make_trace(one, ended=one.ended)
        taker.put(trace, tensors)
        taker._keep([encode(trace), *tensors], Box())  # type: ignore[arg-type]
    return taker


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_purge_empties_memory_and_disk_of_one_tenant_and_holds_over_a_restart(
    model, spans, tmp_path
):
    _, target = model
    taker = filled(target, tmp_path, spans)
    counts = taker.purge("a", 1000.0)
    assert counts.journal_traces == counts.replay_spans + counts.heldout_spans == 6
    assert taker.purge("a", 1000.0) == PurgeCounts()
    state = taker.state()
    taker.close()
    kept = everything(tmp_path)
    for one in spans:
        assert (one.last.numpy().tobytes() in kept) == (one.tenant == "b")
    again = intake(target, tmp_path)
    again.load_state(json.loads(json.dumps(state)))
    seen: list[Span] = []
    again.reload(Box(), seen.append)  # type: ignore[arg-type]
    assert again.replay.training_tokens + again.replay.heldout_tokens == sum(
        one.anchors for one in spans if one.tenant == "b"
    )
    late = make_trace(spans[0], ended=999.0)
    with pytest.raises(RecordError, match="purged"):
        again.put(*late)
    again.put(*make_trace(spans[0], ended=1000.5))


def test_what_is_older_than_it_may_be_goes_and_the_rest_stays(model, spans, tmp_path):
    _, target = model
    taker = filled(target, tmp_path, spans)
    assert taker.expire(106.0) == 6
    assert taker.expire(106.0) == 0
    kept = everything(tmp_path)
    for one in spans:
        assert (one.last.numpy().tobytes() in kept) == (one.ended >= 106.0)
    held = taker.replay.training_tokens + taker.replay.heldout_tokens
    assert held == sum(one.anchors for one in spans if one.ended >= 106.0)


def test_what_is_refused_is_remembered_on_the_disk_for_its_owner_only(tmp_path):
    Cutoffs(tmp_path / "purges.json").add("a", 5.0)
    again = Cutoffs(tmp_path / "purges.json")
    again.add("a", 3.0)  # an order that comes late takes nothing back
    with pytest.raises(RecordError):
        again.check("a", 5.0)
    again.check("a", 5.1)
    again.check("b", 1.0)
    assert stat.S_IMODE((tmp_path / "purges.json").stat().st_mode) == 0o600


# --- recordings ---


def recorded(path: Path, owners: str) -> Recorder:
    recorder = Recorder(path, "target-a", "eagle3")
    for i, tenant in enumerate(owners):
        recorder.add(message(i, tenant, ended=float(i)))
    return recorder


def requests(path: Path) -> list[str]:
    return [trace.request_id for trace, _ in Recording(path)]


@pytest.mark.parametrize("owners", ["ab", "aab", "bba", "aaa", "bbb", ""])
def test_a_recording_loses_the_tenant_while_it_is_written_and_at_rest(tmp_path, owners):
    expected = [f"b{i}" for i, tenant in enumerate(owners) if tenant == "b"]
    live = recorded(tmp_path / "live", owners)
    assert live.delete(of("a")) == owners.count("a")
    assert b"a" * 16 not in everything(tmp_path)
    live.add(message(50, "b"))
    live.close()
    assert requests(tmp_path / "live") == [*expected, "b50"]
    recorded(tmp_path / "rest", owners).close()
    assert delete_from(tmp_path / "rest", of("a")) == owners.count("a")
    assert requests(tmp_path / "rest") == expected
    assert b"a" * 16 not in everything(tmp_path)
    for name in ("live", "rest"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_recording_that_is_being_written_is_left_to_its_recorder(tmp_path):
    live = recorded(tmp_path / "live", "ab")
    live._file.flush()
    assert delete_from(tmp_path / "live", of("a")) == 0
    assert live.delete(of("b")) == 1
    assert delete_from(tmp_path / "live", of("a")) == 0  # the copy in its place is held as well
    live.close()
    assert delete_from(tmp_path / "live", of("a")) == 1


def test_a_recording_that_was_cut_off_stays_so(tmp_path):
    recorder = recorded(tmp_path / "cut", "abab")
    recorder._file.close()
    assert delete_from(tmp_path / "cut", of("a")) == 2
    assert [t.request_id for t, _ in Recording(tmp_path / "cut", cut_ok=True)] == ["b1", "b3"]


def test_everything_at_rest_in_a_home_is_reached(tmp_path):
    home = tmp_path / "learner"
    (home / "own").mkdir(parents=True)
    other = Journal(home / "other-target" / "replay", 10**9)
    for i in range(4):
        other.append(message(i, "ab"[i % 2], ended=1000.0 * i))
    other.close()
    recorded(tmp_path / "r.traces", "aabb").close()
    note_recording(home, tmp_path / "r.traces", retention_hours=1.0)
    note_recording(home, tmp_path / "deleted by hand", retention_hours=1.0)
    rest = AtRest(home, home / "own")
    assert rest.purge("a") == (2, 2)
    assert rest.purge("a") == (0, 0)
    assert len(list((home / NOTES).iterdir())) == 1
    assert rest.expire(now=3602.5, retention_hours=0.5) == (1, 1)
    assert requests(tmp_path / "r.traces") == ["b3"]


# --- orders ---


def test_an_order_is_carried_out_and_answered_however_often_it_comes(model, spans, tmp_path):
    _, target = model
    folder = tmp_path / "learner" / "tiny"
    filled(target, folder, spans).close()
    base = f"ipc://{tmp_path}/s"
    learner = Learner(LearnSettings(), folder, target, "tiny", base)
    context: zmq.Context = zmq.Context()
    try:
        socket = open_socket(context, zmq.DEALER, learner_endpoints(base)[1], bind=False)
        learner._intake.expire(0.0)
        learner._next_sweep = float("inf")
        answers = []
        for _ in range(2):
            socket.send(encode(Purge("order-1", "a", 1000.0)))
            learner._inbox.wait(5000)
            learner.turn()
            assert socket.poll(5000)
            answers.append(decode_learner_message(socket.recv_multipart()[0]))
        assert answers[0] == answers[1] == Purged("order-1", PurgeCounts(journal_traces=6))
    finally:
        learner._inbox.close()
        context.destroy(linger=0)
    kept = everything(folder)
    assert all((one.last.numpy().tobytes() in kept) == (one.tenant == "b") for one in spans)


# --- shares ---


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3000)), max_size=200),
    st.floats(0.05, 0.9),
)
def test_a_bounded_tenant_is_never_more_of_what_is_learned_from_than_it_may_be(come, most):
    share = TenantShare()
    share.most = {"a": most}
    for tenant, tokens in come:
        share.observe(tenant, tokens)
        state = share.state()
        others = sum(count for name, count in state["offered"].items() if name != "a")
        assert state["taken"].get("a", 0.0) <= most / (1 - most) * others + 1e-6


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 10**6), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.floats(0.01, 1)),
)
def test_no_tenant_is_drawn_more_than_it_may_be_while_another_can_be(tokens, most):
    shares = fair_shares(tokens, most)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares.keys() == tokens.keys()
    if sum(most.get(name, 1.0) for name in tokens) >= 1:
        assert all(share <= most.get(name, 1.0) + 1e-9 for name, share in shares.items())


def test_a_learner_takes_nothing_from_a_peer_without_its_keys(tmp_path):
    """The trace socket of a learner with CURVE keys, and a sender that has none of them."""
    from rlcore.curve import curve_client, curve_server, make_pair
    from tests.e2e.tap import two_free_ports

    for name in ("learner", "server", "stranger"):
        make_pair(tmp_path / name)
    base = f"tcp://127.0.0.1:{two_free_ports()}"
    inbox = Inbox(base, curve_server(tmp_path / "learner", tmp_path / "server.pub"))
    context: zmq.Context = zmq.Context()
    try:
        for name in (None, "stranger", "server"):
            curve = name and curve_client(tmp_path / name, tmp_path / "learner.pub")
            sender = open_socket(
                context, zmq.PUSH, learner_endpoints(base)[0], bind=False, curve=curve or None
            )
            ready = sender.poll(8000 if name == "server" else 600, zmq.POLLOUT)
            if ready:
                sender.send_multipart(message(1, "a"))
            inbox.wait(500)
            taken = inbox.traces(lambda trace: None)
            assert len(taken) == (1 if name == "server" else 0), name
        assert inbox.rejected == {}
    finally:
        inbox.close()
        context.destroy(linger=0)


def test_a_sweep_reads_no_file_again_that_holds_nothing_old(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j", 10**9)
    for i in range(3):
        journal.append(message(i, "a", ended=10.0 + i))
    opened: list[Path] = []
    real = open

    def counted(path, *args, **kwargs):
        opened.append(Path(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", counted)
    assert [journal.expire(before) for before in (5.0, 5.0, 9.0)] == [0, 0, 0]
    assert len(opened) == 1
    journal.append(message(3, "a", ended=13.0))  # into the same segment
    assert len(journal.segments()) == 1
    assert journal.expire(11.5) == 2
    assert journal.expire(11.5) == 0
    assert [trace.ended for trace, _ in journal.read()] == [12.0, 13.0]
    journal.append(message(4, "a", ended=14.0))
    assert [trace.ended for trace, _ in journal.read()] == [12.0, 13.0, 14.0]
