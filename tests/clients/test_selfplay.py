"""Self-play: how prompts begin and end, that none is sent twice, and that every wait has an end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

import clients.selfplay.traffic as traffic_module
from clients.selfplay.generate import generate, main
from clients.selfplay.template import ChatTemplate, SelfPlayError, UserTurn
from clients.selfplay.traffic import Share
from clients.workload import read_workload
from tests.clients.stub import running
from tests.clients.target import CHATML, SYSTEM, Target

LLAMA = (
    "<|begin|>{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
INST = "<s>{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def turn(template: str | None, before: list[dict[str, str]]) -> UserTurn:
    async def ask(url: str) -> UserTurn:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            return await ChatTemplate(http).user_turn(before)

    with running(Target(template)) as target:
        return asyncio.run(ask(target.url.removesuffix("/v1")))


SAID = [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "Yes?"}]


@pytest.mark.parametrize(
    ("template", "before", "opening", "end"),
    [
        (CHATML, [], f"{SYSTEM}<|im_start|>user\n", "<|im_end|>"),
        (
            CHATML,
            SAID,
            f"{SYSTEM}<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
            "<|im_start|>user\n",
            "<|im_end|>",
        ),
        (LLAMA, [], "<|begin|><|head|>user<|/head|>\n\n", "<|eot|><|head|>assistant<|/head|>"),
        (INST, [], "<s>[INST] ", "[/INST]"),
        (BARE, [], "user: ", ""),
    ],
)
def test_a_turn_begins_and_ends_as_the_targets_template_has_it(
    template: str, before: list[dict[str, str]], opening: str, end: str
) -> None:
    assert turn(template, before) == UserTurn(opening, end)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "needs one; the server says: As of transformers v4.44, .* no longer allowed.$"),
        ("{{ messages[0].content | lower }}", "does not show the user's text as it is"),
    ],
)
def test_a_target_without_a_usable_template_is_refused_in_one_line(
    template: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SelfPlayError, match=message) as refused:
        turn(template, [])
    with running(Target(template)) as target:
        words = ["--url", target.url, "--tokens", "9", "--prompts", str(tmp_path / "p.jsonl")]
        assert main(words) == 2
    assert capsys.readouterr().err == f"error: {refused.value}\n"


def test_prompts_begin_as_the_embedded_models_always_did(tmp_path: Path) -> None:
    target = Target()
    with running(target):
        assert (
            main(["--url", target.url, "--tokens", "800", "--prompts", str(tmp_path / "p.jsonl")])
            == 0
        )
    assert all(
        body["prompt"].startswith(f"{SYSTEM}<|im_start|>user\n") for body in target.completions
    )
    assert {tuple(body["stop"]) for body in target.completions} == {("<|im_end|>",)}
    prompts = read_workload(tmp_path / "p.jsonl")
    assert len({p.id for p in prompts}) == len({p.key for p in prompts}) == len(prompts) > 30


def test_servers_beside_each_other_send_no_prompt_twice(tmp_path: Path) -> None:
    async def together() -> None:
        taken: set[str] = set()
        shares = [
            Share(target.url, 600, 5, tmp_path / f"{i}.jsonl")
            for i, target in enumerate((first, second))
        ]
        await asyncio.gather(*(generate(s, 4, taken) for s in shares))

    # One seed and one way to go on: without a common memory both write the same.
    first, second = Target(), Target()
    with running(first), running(second):
        asyncio.run(together())
    keys = [p.key for i in range(2) for p in read_workload(tmp_path / f"{i}.jsonl")]
    assert len(keys) == len(set(keys)) > 60


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("same", "no answer from .* in 1 s .*it writes no new prompts"),
        ("hang", "no answer from .* in 1 s .*nothing within 1 s"),
        ("refuse", "fails again and again: .*engine died"),
    ],
)
def test_a_server_or_target_that_does_not_get_on_is_given_up(
    how: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic_module, "draw_lead", lambda _: ("free", ""))
    monkeypatch.setattr(traffic_module, "STALLED_AFTER", 600 if how == "refuse" else 1.0)
    monkeypatch.setattr(traffic_module, "REQUEST_DEADLINE", 0.6)
    monkeypatch.setattr(traffic_module, "GIVE_UP_AFTER", 2)
    target = Target(how=how)
    with running(target):
        begun = time.monotonic()
        with pytest.raises(SelfPlayError, match=message):
            asyncio.run(generate(Share(target.url, 400, 0, tmp_path / "p.jsonl"), 4, set()))
        assert time.monotonic() - begun < 20


def test_a_prompt_file_that_is_there_is_not_written_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "p.jsonl"
    kept.write_text("kept")
    assert main(["--url", "http://127.0.0.1:9/v1", "--tokens", "9", "--prompts", str(kept)]) == 2
    assert capsys.readouterr().err == f"error: {kept}: File exists\n"
    assert kept.read_text() == "kept"
