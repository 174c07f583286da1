"""``rl-train``: check the settings, bring everything up, run, and leave a policy folder."""

from __future__ import annotations

import asyncio
import sys

from rlcore.cli import guarded
from rlcore.environments.host import EnvironmentHost
from rlcore.errors import UsageError
from rlcore.home import Home
from rlcore.log import get_logger, setup_logging
from rlcore.rl import saved as saving
from rlcore.rl.export import ADAPTER, POLICY, export, export_adapter
from rlcore.rl.run_file import with_file
from rlcore.rl.settings import RLTrainSettings
from rlcore.settings import load
from rlcore.target import local_model, model_identity

log = get_logger("rl")


def console() -> int:
    """The ``rl-train`` script."""
    return guarded(main, sys.argv[1:])


def main(argv: list[str]) -> int:
    settings = load(RLTrainSettings, with_file(argv), "rl-train")
    setup_logging("rl", settings.log_json, settings.log_level)
    home = Home(settings.home)
    if settings.dry_run:
        return _dry_run(settings, home)
    settings.out.mkdir(parents=True, exist_ok=True)
    with Home(settings.out.absolute()).lock("rl-train"):
        asyncio.run(_run(settings, home))
    return 0


def _dry_run(settings: RLTrainSettings, home: Home) -> int:
    """Everything that can be checked without a model in memory."""
    from rlcore.environments.registry import make

    recipe = settings.chosen_recipe()
    print(f"recipe      {recipe.name}: {recipe.source}")
    environment = make(settings.environment.name, settings.environment.options)
    for split in ("train", "test"):
        size = environment.size(split)
        print(f"{split:<11} {'tasks without end' if size is None else f'{size} tasks'}")
    task = environment.task("train", 0)
    print(f"first task  {task.id}: {environment.reset(task)[-1].content[:100]!r}")
    rollouts = settings.groups_per_update * settings.group_size
    print(
        f"update      {settings.groups_per_update} groups x {settings.group_size} = {rollouts} rollouts"
    )
    print(f"model       {settings.model} (not loaded)")
    print("nothing was started")
    return 0


async def _run(settings: RLTrainSettings, home: Home) -> None:
    import torch
    from transformers import AutoTokenizer

    from rlcore.rl.engine import engine_of
    from rlcore.rl.learn import PolicyLearner
    from rlcore.rl.run import Run
    from rlcore.rl.threads import split_cores

    base = local_model(settings.model, home)
    base_id = model_identity(base)
    resumed = None
    if settings.resume:
        resumed = saving.load(settings.out, Run.identity(settings, base_id))
        log.info("going on", update=resumed.update, waiting_groups=len(resumed.waiting))
    elif (settings.out / saving.FOLDER).exists():
        raise UsageError(
            f"{settings.out} holds a run already; go on with --resume, or give another --out"
        )
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    options = settings.environment
    split = split_cores(settings)
    torch.set_num_threads(split.trainer)
    engine = engine_of(settings, base, settings.out, split.engine, settings.lora.rank)
    async with EnvironmentHost(
        options.name, options.options, workers=options.workers, deadline_s=options.deadline_s
    ) as host:
        try:
            starting = asyncio.create_task(engine.start())
            learner = await asyncio.to_thread(PolicyLearner, settings, base, split.trainer)
            await starting
            run = Run(settings, base_id, learner, engine, split, host, tokenizer, resumed)
            await run.run()
        finally:
            await engine.close()
    export(learner, base, settings.out / POLICY)
    if learner.lora is not None:
        export_adapter(learner, settings.out / ADAPTER)
    log.info("done", updates=run.version, policy=str(settings.out / POLICY))
