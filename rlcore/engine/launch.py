"""Turns our settings into vLLM's: environment, command-line arguments, engine configuration.

Read against vLLM 0.32.0. Nothing here may import vLLM at module level: ``prepare_environment`` must
run before the first import of it.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from rlcore.cores import usable
from rlcore.engine.adapter_files import check_adapter
from rlcore.engine.options import EngineOptions
from rlcore.errors import PacelineError
from rlcore.settings import ServeSettings

if TYPE_CHECKING:
    from rlcore.engine.frontend import PacelineLLM

WORKER_CLASS = "rlcore.engine.worker.PacelineWorker"
SCHEDULER_CLASS = "rlcore.engine.scheduler.PacelineScheduler"

DEFAULT_KV_GIB = 2
"""KV cache on a CPU when nothing is said: 2 GiB hold about 90,000 tokens of the embedded model."""


class EngineArgumentError(PacelineError):
    """vLLM would not accept these settings."""


def prepare_environment(settings: ServeSettings) -> None:
    """Pin what is tested: the V1 runner everywhere, and Intel's OpenMP for the CPU worker."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # Its routes change weights and caches behind our back.
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # The server starts a dead engine again by itself; vLLM would end the process.
    os.environ["VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"] = "1"
    # As many choices a request as OpenAI allows; vLLM would take 16,384.
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", "128")
    # vLLM warns about its own choices on a CPU at every start, in every process.
    os.environ.setdefault(
        "VLLM_LOGGING_LEVEL", "DEBUG" if settings.log_level == "DEBUG" else "ERROR"
    )
    # What a step frees is kept for the next one and not given back to the system (glibc's mallopt).
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 * 2**20))
    os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**30))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists() and "libiomp5" not in os.environ.get("LD_PRELOAD", ""):
        os.environ["LD_PRELOAD"] = ":".join(
            filter(None, [os.environ.get("LD_PRELOAD"), str(openmp)])
        )


def engine_arguments(
    settings: ServeSettings, target: Path, model_name: str, draft: Path, options: EngineOptions
) -> Namespace:
    """vLLM's own parsed arguments, the user's (after ``--``) first, ours over them.

    Raises EngineArgumentError with vLLM's words when it refuses the user's.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _check_cores(settings.cores)
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve", exit_on_error=False))
    given = [str(target), *settings.engine_args]
    try:
        args = parser.parse_args(given)
    except SystemExit:
        raise EngineArgumentError(
            "vLLM does not accept the arguments after '--'; see above"
        ) from None
    except Exception as error:
        raise EngineArgumentError(
            f"vLLM does not accept the arguments after '--': {error}"
        ) from None
    args.model = str(target)
    args.served_model_name = [model_name]
    args.host, args.port = settings.host, settings.port
    args.dtype = settings.dtype
    args.max_model_len = settings.max_model_len or args.max_model_len
    args.max_num_seqs = settings.max_running or args.max_num_seqs
    args.enforce_eager = args.enforce_eager or (
        current_platform.is_cpu() and settings.enforce_eager
    )
    if args.kv_cache_memory_bytes is None and current_platform.is_cpu():
        args.kv_cache_memory_bytes = int((settings.kv_cache_gib or DEFAULT_KV_GIB) * 2**30)
    if current_platform.is_cpu() and args.distributed_executor_backend is None:
        from rlcore.engine import executor

        if executor.fits(args.tensor_parallel_size * args.pipeline_parallel_size):
            cores = executor.prepare(settings.cores)
            options = msgspec.structs.replace(
                options, cores=cores, allotted=settings.cores or cores
            )
            args.distributed_executor_backend = executor.InlineExecutor
    if settings.cores is not None and not options.cores:
        os.environ["OMP_NUM_THREADS"] = str(settings.cores)  # for as long as it runs
    for adapter in args.lora_modules or ():
        if Path(adapter.path).expanduser().is_dir():  # others are hub ids, which vLLM fetches
            check_adapter(adapter.name, Path(adapter.path).expanduser())
    if settings.policy_lora_rank:
        _make_room_for_policy(args, settings.policy_lora_rank)
    args.worker_cls = WORKER_CLASS
    args.scheduler_cls = SCHEDULER_CLASS
    args.async_scheduling = False
    if settings.keys_file is not None:
        args.scheduling_policy = "priority"  # tenants have ranks
    args.additional_config = {**(args.additional_config or {}), **options.to_config()}
    args.api_key = None  # our own guard covers every route
    args.speculative_config = speculative_config(
        settings.draft_method,
        draft,
        settings.speculative_tokens,
        settings.speculation != "fixed",
    )
    validate_parsed_serve_args(args)
    return args


def _check_cores(asked: int | None) -> None:
    if asked is not None and asked > usable():
        raise EngineArgumentError(f"--cores {asked}: this process may use {usable()}")


def renewed(args: Namespace, draft: Path, version: int, rates: list[float]) -> Namespace:
    """The same arguments for an engine that starts with another version of the drafter."""
    options = EngineOptions.from_config(args.additional_config)
    options = msgspec.structs.replace(options, draft_version=version, draft_rates=rates)
    again = Namespace(**vars(args))
    again.additional_config = {**args.additional_config, **options.to_config()}
    again.speculative_config = {**args.speculative_config, "model": str(draft)}
    return again


def _make_room_for_policy(args: Namespace, rank: int) -> None:
    """A place for the policy's adapter beside those that the user names."""
    from vllm.config.lora import MaxLoRARanks

    ranks = get_args(MaxLoRARanks)
    needed = max(rank, args.max_lora_rank if args.enable_lora else 0)
    if needed > max(ranks):
        raise EngineArgumentError(f"an adapter's rank is at most {max(ranks)}, not {needed}")
    args.max_lora_rank = min(r for r in ranks if r >= needed)
    args.max_loras = 1 + (args.max_loras if args.enable_lora else 0)
    args.enable_lora = True
    if args.max_cpu_loras is not None:
        args.max_cpu_loras += 1


def speculative_config(method: str, draft: Path, most_drafts: int, varies: bool) -> dict[str, Any]:
    """vLLM's, for a drafter that drafts up to ``most_drafts`` tokens, greedily."""
    config = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": most_drafts,
        # The pruned vocabulary's argmax is mapped; its logits are not scattered into the target's
        # vocabulary first. Draft models have no pruned vocabulary.
        "use_local_argmax_reduction": method == "eagle3",
    }
    if varies:
        # With any table by batch size vLLM is prepared for a K that changes (on a GPU that means
        # piecewise CUDA graphs). The scheduler sets it.
        config["num_speculative_tokens_per_batch_size"] = [[1, 1, most_drafts]]
    return config


def start_engine(args: Namespace) -> PacelineLLM:
    """Start the engine's processes; raises what vLLM raises when they do not come up."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from rlcore.engine.frontend import PacelineLLM

    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    llm = PacelineLLM.from_vllm_config(
        vllm_config=config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )
    if EngineOptions.from_config(config.additional_config).policy_rank:
        from rlcore.engine.adapters import POLICY_ADAPTER

        llm.policy_adapter = POLICY_ADAPTER
    return llm
