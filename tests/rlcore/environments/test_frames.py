from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments import frames
from rlcore.environments.base import Task

TASKS = st.builds(
    Task,
    id=st.text(),
    environment=st.text(),
    split=st.sampled_from(["train", "test"]),
    index=st.integers(0, 2**40),
    data=st.dictionaries(st.text(), st.text() | st.integers(-(2**40), 2**40) | st.none()),
)
REQUESTS = st.one_of(
    st.builds(frames.GetTask, split=st.just("train"), index=st.integers(0, 2**40)),
    st.builds(frames.Reset, episode=st.integers(0, 2**40), task=TASKS),
    st.builds(frames.Step, episode=st.integers(0, 2**40), reply=st.text()),
    st.builds(frames.GetScore, episode=st.integers(0, 2**40)),
)


@given(st.lists(REQUESTS, max_size=5))
def test_messages_come_out_as_they_went_in(requests: list[frames.Request]) -> None:
    stream = io.BytesIO(b"".join(frames.pack(request) for request in requests))
    for request in requests:
        body = frames.read_frame(stream)
        assert body is not None
        assert msgspec.msgpack.decode(body, type=frames.Request) == request
    assert frames.read_frame(stream) is None


def test_a_frame_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(frames.FrameTooLarge):
        frames.pack(frames.Step(0, "x" * (frames.MAX_FRAME_BYTES + 1)))
    with pytest.raises(frames.FrameTooLarge):
        frames.read_frame(io.BytesIO(b"\xff\xff\xff\xff"))


def test_a_frame_that_was_cut_off_is_the_end() -> None:
    whole = frames.pack(frames.Step(1, "reply"))
    for length in range(len(whole)):
        assert frames.read_frame(io.BytesIO(whole[:length])) is None
