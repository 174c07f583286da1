"""``paceline chat`` and the client against a running server: what is shown as drafted was drafted."""

from __future__ import annotations

import re

import pytest

from clients.chat.answer import Answer, Options, stream
from clients.client import PacelineClient
from rlcore.feed import History, Sample
from tests.clients.terminal import Terminal
from tests.conftest import Served

pytestmark = [pytest.mark.slow, pytest.mark.on_server("draft_model")]

PROMPTS = {
    "until it stops": ("What is the capital of France? Answer in one word.", 200),
    "until the limit": ("Write a story about a lighthouse.", 61),
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_pieces_shown_as_drafted_are_the_accepted_drafts(served: Served, prompt):
    """What stops an answer may cut its last step, which the usage counts whole."""
    text, most = PROMPTS[prompt]
    answer = Answer()
    with PacelineClient(served.server.url) as client:
        options = Options(model=served.model, max_tokens=most, temperature=0.0)
        pieces = list(stream(client, [{"role": "user", "content": text}], options, answer))
    usage = answer.usage
    assert usage is not None
    assert sum(answer.steps) == answer.tokens
    counted = 1 + sum(count.emitted + count.plain_steps for count in usage.versions)
    cut = counted - answer.tokens
    assert cut == 0 or (cut > 0 and answer.finish_reason == "stop")
    assert answer.accepted == usage.accepted - cut
    assert "".join(piece.text for piece in pieces) == answer.text
    assert {piece.accepted for piece in pieces} <= {True, False}
    if most < 100:
        assert answer.finish_reason == "length"
        assert usage.accepted > 5


def test_the_command_shows_it_on_a_terminal(served: Served):
    words = ["chat", "--url", served.server.url, "--max-tokens", "40", "--temperature", "0"]
    with Terminal(*words) as terminal:
        terminal.wait_for("> ")
        terminal.send("Count from one to ten.\r")
        terminal.wait_for(r"tokens/s, acceptance length \d\.\d\d, draft \d+.*\]\s+> ")
        assert "\x1b[32m" in terminal.raw
        found = re.search(r"\[(\d+) tokens, (\d+) of them drafts", terminal.text)
        assert found is not None
        assert 0 < int(found[2]) < int(found[1]) <= 40
        terminal.send("\x04")
        assert terminal.wait_end() == 0


def test_the_servers_own_routes_are_read_as_they_are(served: Served):
    with PacelineClient(served.server.url) as client:
        status = client.paceline.status()
        assert status.draft.method == "draft_model"
        assert status.draft.live in [draft.version for draft in client.paceline.drafts().drafts]
        assert client.paceline.policy().live == 0
        assert client.paceline.history() == []
        feed = client.paceline.feed(60)
        first, second = next(feed), next(feed)
        assert isinstance(first, History)
        assert isinstance(second, Sample)
        assert second.draft_version == status.draft.live
        feed.close()
    with Terminal("top", "--url", served.server.url) as terminal:
        terminal.wait_for("speed-up")
        terminal.send("q")
        assert terminal.wait_end() == 0
