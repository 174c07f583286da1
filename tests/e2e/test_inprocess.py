"""An engine of the process samples what a server samples, token by token, before and after a swap."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore.generator.base import Completion, Generator, GeneratorError
from rlcore.generator.inprocess import InProcessGenerator
from rlcore.generator.places import InProcess, OwnServer, Place
from rlcore.records.trace import Sampling
from rlcore.rl.engine import server_flags
from rlcore.rl.settings import RLTrainSettings
from tests.conftest import ONE_THREAD
from tests.e2e import tiny

torch.set_num_threads(1)

pytestmark = pytest.mark.slow

PROMPTS = [[7, 20 + i, 300 - i, 5 * i + 11, *range(40, 40 + 3 * i)] for i in range(5)]
LENGTHS = [24, 9, 17, 30, 12]
GREEDY = Sampling(temperature=0.0)
LONG = 200
DEADLINE = 120.0


class Look(NamedTuple):
    """What one generator was seen to do; everything but the last two must be the other's too."""

    before: list[Completion]
    after: list[Completion]
    refused: str
    longest: int
    through: list[Completion]
    """Requests that a swap fell into."""
    drafted: tuple[int, int]
    """Steps with drafts, and the tokens emitted in them."""


@pytest.fixture(scope="module")
def policies(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("inprocess")
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    model = tiny.make_target(folder / "policy-0", len(tokenizer))
    tokenizer.save_pretrained(folder / "policy-0")
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + 0.05 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder / f"policy-{seed}")
    return [folder / f"policy-{i}" for i in range(3)]


def flags(base: Path, out: Path, **engine: Any) -> list[str]:
    options = {"max_model_len": 256, "speculation": "fixed", "where": "process", **engine}
    settings = RLTrainSettings(
        out=out,
        sampling={"max_prompt_tokens": 64, "max_tokens": 64},
        engine={**options, "serve_flags": ["--kv-cache-gib", "0.5"]},
    )
    return server_flags(settings, base, out, cores=1)


def digest(folder: Path) -> str:
    with open(folder / "model.safetensors", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def completions(generator: Generator) -> list[Completion]:
    asked = [
        generator.complete(prompt, GREEDY, length, priority=i)
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    return list(await asyncio.gather(*asked))


async def look(generator: Generator, policies: list[Path]) -> Look:
    before = await completions(generator)
    await generator.publish(1, policies[1], digest(policies[1]))
    after = await completions(generator)
    with pytest.raises(GeneratorError) as refused:
        await generator.publish(1, policies[2], digest(policies[2]))
    await generator.compute_on(1)
    going = [
        asyncio.create_task(generator.complete(p, Sampling(), LONG)) for p in PROMPTS
    ]  # long enough for a swap to fall into some of them
    await asyncio.sleep(0.5)
    published = await generator.publish(2, policies[2], digest(policies[2]))
    assert published.version == 2
    through = list(await asyncio.gather(*going))
    status = await generator.status()
    assert status.policy_version == 2
    return Look(
        before, after, str(refused.value), await generator.longest(), through,
        (status.draft_steps, status.emitted),
    )  # fmt: skip


@dataclass
class Troubles:
    """What an engine of the process was put through."""

    aborted: list[Any]
    late: GeneratorError
    too_long: GeneratorError
    left_over: int
    """Requests that the engine still has."""
    before: Completion
    then: Completion
    """The same request before and after."""
    first: Completion
    """By the policy that the engine started with."""
    lost_before: tuple[bool, bool] = (True, False)
    """Whether it was known to be lost before it was killed, and after."""
    killed: Any = None
    unpublished: Any = None
    again: Any = None


async def refusal(request: Awaitable[Any]) -> GeneratorError:
    with pytest.raises(GeneratorError) as error:
        await request
    return error.value


async def put_through(generator: InProcessGenerator, first: Completion) -> Troubles:
    before = await generator.complete(PROMPTS[0], GREEDY, 8)
    hasty = [asyncio.create_task(generator.complete(p, Sampling(), LONG)) for p in PROMPTS]
    await asyncio.sleep(0.2)
    for task in hasty:
        task.cancel()
    aborted = list(await asyncio.gather(*hasty, return_exceptions=True))
    generator._deadline_s = 0.01
    late = await refusal(generator.complete(PROMPTS[0], Sampling(), LONG))
    generator._deadline_s = DEADLINE
    too_long = await refusal(generator.complete(list(range(1, 400)), GREEDY, 8))
    then = await generator.complete(PROMPTS[0], GREEDY, 8)
    left_over = len(generator.llm.output_processor.request_states)
    return Troubles(aborted, late, too_long, left_over, before, then, first)


async def kill(
    place: InProcess, generator: InProcessGenerator, troubles: Troubles, policies: list[Path]
) -> None:
    going = asyncio.create_task(generator.complete(PROMPTS[1], Sampling(), LONG))
    await asyncio.sleep(0.1)
    before = await place.lost()
    publishing = asyncio.create_task(generator.publish(3, policies[1], digest(policies[1])))
    await asyncio.sleep(0)
    manager = generator.llm.engine_core.resources.engine_manager
    for process in manager.processes:
        process.kill()
    troubles.killed = await refusal(going)
    async with asyncio.timeout(60):
        troubles.unpublished = await refusal(publishing)
    async with asyncio.timeout(60):
        while not await place.lost():
            await asyncio.sleep(0.1)
    troubles.lost_before = before, await place.lost()
    again = await place.start_again()
    length = len(troubles.first.token_ids)
    troubles.again = await again.complete(PROMPTS[0], GREEDY, length)


def at(place: Place, do: Callable[[Generator], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        try:
            return await do(await place.start())
        finally:
            await place.stop()

    return asyncio.run(run())


@pytest.fixture(scope="module")
def seen_inside(policies, tmp_path_factory) -> tuple[Look, Troubles]:
    out = tmp_path_factory.mktemp("process")
    place = InProcess(flags(policies[0], out), DEADLINE)

    async def do(generator: Any) -> tuple[Look, Troubles]:
        seen = await look(generator, policies)
        troubles = await put_through(generator, seen.before[0])
        await kill(place, generator, troubles, policies)
        return seen, troubles

    found: tuple[Look, Troubles] = at(place, do)
    return found


@pytest.fixture(scope="module")
def troubles(seen_inside: tuple[Look, Troubles]) -> Troubles:
    return seen_inside[1]


@pytest.fixture(scope="module")
def both(seen_inside, policies, tmp_path_factory) -> tuple[Look, Look]:
    out = tmp_path_factory.mktemp("server")

    async def do(generator: Generator) -> Look:
        return await look(generator, policies)

    place = OwnServer(flags(policies[0], out), out / "server.log", ONE_THREAD, DEADLINE)
    return seen_inside[0], at(place, do)


def same(inside: list[Completion], server: list[Completion]) -> None:
    for one, other in zip(inside, server, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.policy_versions == other.policy_versions
        assert (one.finish_reason, one.draft_version) == (other.finish_reason, other.draft_version)


def test_both_sample_the_same_tokens_with_the_same_log_probabilities(both):
    inside, server = both
    assert [len(done.token_ids) for done in inside.before] == LENGTHS
    same(inside.before, server.before)
    assert inside.longest == server.longest == 256


def test_both_sample_from_a_policy_that_was_published(both):
    inside, server = both
    assert [done.token_ids for done in inside.before] != [done.token_ids for done in inside.after]
    assert {v for done in inside.after for v in done.policy_versions} == {1}
    same(inside.after, server.after)
    for seen in both:
        assert "version 1" in seen.refused


def test_a_token_is_known_by_the_version_that_sampled_it(both, policies):
    models = {
        version: AutoModelForCausalLM.from_pretrained(policies[version], dtype=torch.float32)
        for version in (1, 2)
    }
    for seen in both:
        versions = {v for done in seen.through for v in done.policy_versions}
        assert versions == {1, 2}, "the swap must fall into a request"
        for prompt, done in zip(PROMPTS, seen.through, strict=True):
            ids = torch.tensor([prompt + done.token_ids])
            with torch.no_grad():
                every = {v: model(ids).logits[0].log_softmax(-1) for v, model in models.items()}
            for i, (token, version) in enumerate(
                zip(done.token_ids, done.policy_versions, strict=True)
            ):
                expected = float(every[version][len(prompt) + i - 1, token])
                assert done.logprobs[i] == pytest.approx(expected, abs=1e-4)


def test_both_count_what_was_drafted(both):
    for seen in both:
        steps, emitted = seen.drafted
        assert 0 < steps <= emitted


def test_aborts_deadlines_and_bad_requests_leave_an_engine_that_works(troubles):
    assert all(isinstance(end, asyncio.CancelledError) for end in troubles.aborted)
    assert "within" in str(troubles.late)
    assert "refused" in str(troubles.too_long)
    assert not troubles.late.gone
    assert not troubles.too_long.gone
    assert troubles.left_over == 0
    assert troubles.then.token_ids == troubles.before.token_ids


def test_a_killed_engine_is_known_to_be_lost_and_comes_back(troubles):
    assert troubles.lost_before == (False, True)
    assert troubles.killed.gone
    assert troubles.unpublished.gone
    assert troubles.again.token_ids == troubles.first.token_ids
    assert troubles.again.policy_versions == [0] * len(troubles.again.token_ids)
