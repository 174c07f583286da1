"""``rl-eval``: accuracy of a policy folder, or of what a server serves, on a run's held-out tasks."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlcore.cli import guarded
from rlcore.environments.host import EnvironmentHost
from rlcore.errors import UsageError
from rlcore.generator.base import Completion
from rlcore.home import Home
from rlcore.log import setup_logging
from rlcore.policy.lora import adapter_facts
from rlcore.records.trace import Sampling
from rlcore.rl.engine import Live, engine_of
from rlcore.rl.episode import Limits
from rlcore.rl.evaluate import Evaluation, evaluate
from rlcore.rl.run_file import flags_of, given_flags, with_file
from rlcore.rl.settings import RLEvalSettings, RLTrainSettings
from rlcore.settings import load
from rlcore.target import local_model
from rlcore.weights import ADAPTER_WEIGHTS, digest_of

WITH_A_URL = frozenset({"engine.url", "engine.api-key", "engine.request-deadline-s"})
"""What of the engine's flags is used when a server runs already."""


def console() -> int:
    """The ``rl-eval`` script."""
    return guarded(main, sys.argv[1:])


def main(argv: list[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        load(RLEvalSettings, argv, "rl-eval")
    if len(argv) < 2 or argv[0].startswith("-"):
        raise UsageError("give a policy folder or a server's URL, then a preset or a TOML file")
    place, rest = argv[0], with_file(argv[1:])
    remote = place.startswith(("http://", "https://"))
    check_flags(given_flags(rest), remote)
    which = ["--engine.where", "server", "--engine.url", place] if remote else ["--model", place]
    adapter = None if remote else adapter_facts(Path(place))
    if adapter is not None:
        which = ["--model", adapter.base_model_name_or_path]
    settings = load(RLEvalSettings, [*rest, *which], "rl-eval")
    setup_logging("rl", settings.log_json, settings.log_level)
    measured = None if adapter is None else Measured(Path(place).absolute(), adapter.r)
    result = asyncio.run(_evaluate(settings, Home(settings.home), measured))
    print(
        f"{result.accuracy:.1%} right, standard error {result.standard_error:.1%} "
        f"({result.tasks} tasks x {result.samples}; {result.failed} episodes failed)"
    )
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(dataclasses.asdict(result), indent=2))
    return 0


def check_flags(flags: Sequence[str], remote: bool) -> None:
    """Raises UsageError for flags of rl-train that an evaluation has no use for.

    ``remote``: whether what is measured is a server.
    """
    others = flags_of(RLTrainSettings) - flags_of(RLEvalSettings)
    for flag in flags:
        if flag in others:
            raise UsageError(
                f"--{flag} is of rl-train; an evaluation does not use it, leave it out"
            )
        if remote and flag.startswith("engine.") and flag not in WITH_A_URL:
            raise UsageError(f"--{flag} is of an engine that is started, not of a server that runs")
        if flag == "engine.url" or (flag == "model" and not remote):
            raise UsageError(f"--{flag} says again what is measured; it is the first word")


@dataclasses.dataclass(frozen=True)
class Measured:
    """A LoRA adapter of the settings' model."""

    folder: Path
    rank: int


async def _evaluate(settings: RLEvalSettings, home: Home, adapter: Measured | None) -> Evaluation:
    from transformers import AutoTokenizer

    from rlcore.rl.threads import engine_cores

    base = local_model(settings.model, home)
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    options, sampling = settings.environment, settings.sampling
    how = Sampling(temperature=settings.evaluate_temperature)
    with tempfile.TemporaryDirectory(prefix="paceline-eval-") as folder:
        rank = 0 if adapter is None else adapter.rank
        cores = engine_cores(settings.engine.threads)
        engine = engine_of(settings, base, Path(folder), cores, rank)
        async with EnvironmentHost(
            options.name, options.options, workers=options.workers, deadline_s=options.deadline_s
        ) as host:
            try:
                await engine.start()
                if adapter is not None:
                    path = adapter.folder / ADAPTER_WEIGHTS
                    sha256 = await asyncio.to_thread(digest_of, path)
                    await engine.publish(Live(1, adapter.folder, sha256))
                limits = Limits(
                    sampling.max_prompt_tokens,
                    sampling.max_tokens,
                    options.max_turns,
                    engine.longest,
                )

                async def complete(token_ids: list[int], most: int) -> Completion:
                    return await engine.complete(token_ids, how, most, learn=False)

                result, _ = await evaluate(
                    host,
                    tokenizer,
                    complete,
                    limits,
                    how,
                    settings.evaluate_tasks,
                    settings.evaluate_samples,
                    settings.concurrency,
                )
            finally:
                await engine.close()
    return result
