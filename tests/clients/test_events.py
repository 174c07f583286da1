"""The feed's events, as lines of a stream."""

from __future__ import annotations

import msgspec
import pytest

from clients.events import FeedParser
from tests.clients.recorded import changes, event, history, sample


def parsed(stream: bytes) -> list:
    parser = FeedParser()
    events = [parser.line(line) for line in stream.decode().splitlines()]
    return [e for e in events if e is not None]


def test_every_event_comes_out_as_it_was_sent_and_comments_are_passed_over():
    sent = [history(3), sample(3), changes()[0], sample(4)]
    stream = b": hello\n\n" + b": still here\n\n".join(map(event, sent))
    assert parsed(stream) == sent


def test_an_event_of_another_name_is_passed_over():
    assert parsed(b"event: news\ndata: {}\n\n" + event(sample(1))) == [sample(1)]


def test_an_event_without_its_end_is_not_one():
    assert parsed(event(sample(1))[:-1]) == []


def test_a_malformed_event_is_an_error():
    with pytest.raises(msgspec.DecodeError):
        parsed(b"event: sample\ndata: {}\n\n")
