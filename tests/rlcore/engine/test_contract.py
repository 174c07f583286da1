"""Every internal name and signature of vLLM that the engine package and the HTTP app rely on.

An upgrade of vLLM fails here first, one readable line for each name that has changed.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import vllm
from vllm.triton_utils import HAS_TRITON


def found(path: str) -> Any:
    """``package.module:Class.attribute``"""
    module, _, names = path.partition(":")
    thing: Any = importlib.import_module(module)
    for name in filter(None, names.split(".")):
        thing = getattr(thing, name)
    return thing


def parameters(path: str) -> list[str]:
    return list(inspect.signature(found(path)).parameters)


def test_the_version_that_was_read():
    assert vllm.__version__.split("+")[0] == "0.32.0"


CALLS = {
    # worker.py
    "vllm.v1.worker.gpu_worker:Worker.load_model": ["self", "load_dummy_weights"],
    "vllm.v1.worker.gpu_worker:Worker.execute_model": ["self", "scheduler_output"],
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens": ["self", "grammar_output"],
    "vllm.v1.worker.gpu_worker:Worker.take_draft_token_ids": ["self"],
    "vllm.v1.worker.gpu_worker:Worker.shutdown": ["self"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": ["self"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_draft_model": ["self"],
    # scheduler.py
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ["self", "throttle_prefills"],
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": [
        "self", "scheduler_output", "model_runner_output",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids": ["self", "draft_token_ids"],
    "vllm.v1.core.sched.scheduler:Scheduler.has_unfinished_requests": ["self"],
    "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state": ["self", "pause_state"],
    "vllm.v1.core.sched.scheduler:Scheduler.get_request_counts": ["self"],
    "vllm.v1.core.sched.scheduler:Scheduler.shutdown": ["self"],
    # policy_swap.py
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation": ["self", "mode", "clear_cache"],
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation": ["self"],
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version": ["self", "new_version"],
    # upkeep.py
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose": [
        "self", "num_speculative_tokens", "target_token_ids", "target_positions",
        "target_hidden_states", "next_token_ids", "token_indices_to_sample",
        "common_attn_metadata", "sampling_metadata", "mm_embed_inputs", "num_rejected_tokens_gpu",
        "slot_mappings",
    ],
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.combine_hidden_states": [
        "self", "hidden_states",
    ],
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.embed_input_ids": [
        "self", "input_ids", "multimodal_embeddings", "is_multimodal",
    ],
    "vllm.model_executor.models.llama_eagle3:LlamaDecoderLayer._norm_after_residual": [
        "self", "hidden_states",
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": [
        "self", "layer", "key", "value", "kv_cache", "slot_mapping",
    ],
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update": [
        "self", "layer", "key", "value", "kv_cache", "slot_mapping",
    ],
    # slot.py
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ["model"],
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing": [
        "model", "model_config",
    ],
    "vllm.model_executor.model_loader.reload.layerwise:_place_kernel_tensors": ["layer", "info"],
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": ["layer"],
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.can_load": ["self"],
    "vllm.model_executor.model_loader.reload.types:LayerReloadingInfo.reset": ["self"],
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM.load_weights": [
        "self", "weights",
    ],
    "vllm.model_executor.models.llama:LlamaForCausalLM.load_weights": ["self", "weights"],
    # readback.py
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply": ["self", "layer", "x", "bias"],
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading": [
        "self", "layer",
    ],
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply": [
        "self", "layer", "x", "bias",
    ],
    "vllm.model_executor.layers.vocab_parallel_embedding:"
    "UnquantizedEmbeddingMethod.process_weights_after_loading": ["self", "layer"],
    # fixes.py
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": [
        "x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to",
    ],
    # frontend.py
    "vllm.v1.engine.output_processor:OutputProcessor.add_request": [
        "self", "request", "prompt", "parent_req", "request_index", "queue",
    ],
    "vllm.v1.engine.output_processor:OutputProcessor._finish_request": ["self", "req_state"],
    "vllm.v1.engine.output_processor:OutputProcessor.abort_requests": [
        "self", "request_ids", "internal",
    ],
    "vllm.v1.engine.async_llm:AsyncLLM._run_output_handler": ["self"],
    "vllm.v1.engine.async_llm:AsyncLLM.shutdown": ["self", "timeout"],
    "vllm.v1.engine.async_llm:AsyncLLM.get_supported_tasks": ["self"],
    "vllm.v1.engine.async_llm:AsyncLLM.collective_rpc": [
        "self", "method", "timeout", "args", "kwargs",
    ],
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.num_output_tokens": ["self"],
    # launch.py
    "vllm.entrypoints.launchers.cli_args:make_arg_parser": ["parser"],
    "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args": ["args"],
    "vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args": ["args"],
    # server/app.py
    "vllm.entrypoints.launchers.app:build_app": ["args", "supported_tasks", "model_config"],
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state": [
        "engine_client", "state", "args", "supported_tasks",
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", CALLS)
def test_a_function_takes_what_it_took(path):
    assert parameters(path) == CALLS[path]


TAKES = {
    "vllm.v1.engine.output_processor:OutputProcessor": [
        "tokenizer", "log_stats", "stream_interval", "tracing_enabled", "admission_stats",
    ],
    "vllm.v1.engine.async_llm:AsyncLLM.from_vllm_config": [
        "vllm_config", "usage_context", "enable_log_requests", "disable_log_stats",
    ],
    "vllm.engine.arg_utils:AsyncEngineArgs.create_engine_config": ["usage_context"],
    "vllm.entrypoints.launchers.utils.ssl:SSLCertRefresher": [
        "ssl_context", "key_path", "cert_path", "ca_path",
    ],
    "vllm.v1.engine.output_processor:OutputProcessor.propagate_error": ["e"],
    "vllm.exceptions:GracefulHTTPError.__init__": ["message", "http_status"],
    "vllm.utils.argparse_utils:FlexibleArgumentParser.__init__": ["kwargs"],
}  # fmt: skip


@pytest.mark.parametrize("path", TAKES)
def test_a_function_still_knows_the_arguments_given_to_it(path):
    assert set(TAKES[path]) <= set(parameters(path))


FIELDS = {
    "vllm.v1.core.sched.output:SchedulerOutput": [
        "num_scheduled_tokens", "total_num_scheduled_tokens", "scheduled_spec_decode_tokens",
        "finished_req_ids", "num_spec_tokens_to_schedule",
    ],
    "vllm.v1.core.sched.output:GrammarOutput": ["structured_output_request_ids"],
    "vllm.v1.outputs:ModelRunnerOutput": ["sampled_token_ids", "req_id_to_index"],
    "vllm.v1.outputs:DraftTokenIds": ["req_ids", "draft_token_ids"],
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": [
        "scheduler_output", "logits", "spec_decode_metadata", "hidden_states", "aux_hidden_states",
    ],
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": ["target_logits_indices", "draft_token_ids"],
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": [
        "prompt_token_ids", "sampling_params", "output_token_ids",
    ],
    "vllm.config:VllmConfig": ["additional_config", "speculative_config", "parallel_config"],
    "vllm.config:SpeculativeConfig": [
        "draft_model_config", "num_speculative_tokens", "use_local_argmax_reduction",
        "num_speculative_tokens_per_batch_size",
    ],
    "vllm.config:ParallelConfig": ["tensor_parallel_size", "data_parallel_size"],
    "vllm.config:SchedulerConfig": ["async_scheduling", "scheduler_cls"],
    "vllm.config:ModelConfig": ["model", "hf_config"],
    "vllm.engine.arg_utils:AsyncEngineArgs": [
        "worker_cls", "async_scheduling", "additional_config", "speculative_config",
        "enforce_eager", "max_model_len", "dtype", "served_model_name", "model",
        "enable_log_requests", "disable_log_stats",
    ],
}  # fmt: skip


@pytest.mark.parametrize("path", FIELDS)
def test_a_record_has_the_fields_that_are_read_or_written(path):
    kind = found(path)
    have = kind._fields if hasattr(kind, "_fields") else [f.name for f in dataclasses.fields(kind)]
    assert set(FIELDS[path]) <= set(have)


ATTRIBUTES = {
    # Set in the constructor, so only the source tells.
    "vllm.v1.worker.worker_base:WorkerBase": [
        "vllm_config", "scheduler_config", "is_driver_worker",
    ],
    "vllm.v1.worker.gpu_worker:Worker": ["use_v2_model_runner", "model_runner"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": [
        "requests", "input_batch", "execute_model_state", "_draft_probs", "_draft_prob_req_ids",
        "drafter",
    ],
    "vllm.v1.core.sched.scheduler:Scheduler": ["vllm_config", "requests", "num_spec_tokens"],
    "vllm.v1.request:Request": ["num_computed_tokens", "num_prompt_tokens", "max_tokens"],
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer": [
        "method", "model", "num_speculative_tokens", "_last_draft_probs", "needs_extra_input_slots",
        "uses_mrope",
    ],
    "vllm.model_executor.models.llama_eagle3:LlamaDecoderLayer": ["_residual_norm"],
    "vllm.model_executor.models.llama:LlamaAttention": [
        "qkv_proj", "q_size", "kv_size", "rotary_emb", "attn",
    ],
    "vllm.model_executor.layers.attention:Attention": [
        "attn_backend", "impl", "kv_cache", "num_kv_heads", "head_size", "head_size_v",
    ],
    "vllm.v1.worker.gpu_input_batch:InputBatch": ["num_computed_tokens_cpu", "_req_ids"],
    "vllm.v1.engine.output_processor:OutputProcessor": [
        "tokenizer", "log_stats", "stream_interval", "tracing_enabled", "admission_stats",
        "request_states",
    ],
    "vllm.v1.engine.output_processor:RequestState": [
        "request_id", "detokenizer", "external_req_id", "request_index", "prompt_len",
        "weight_version_starts",
    ],
    "vllm.v1.engine.async_llm:AsyncLLM": ["output_handler", "output_processor", "model_config"],
    "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM": [
        "draft_id_to_target_id", "lm_head", "model",
    ],
    "vllm.model_executor.layers.linear:LinearBase": ["params_dtype", "quant_method"],
    "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": ["quant_method"],
}  # fmt: skip


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_an_object_sets_the_attributes_that_are_read(path):
    source = inspect.getsource(found(path))
    missing = [
        name for name in ATTRIBUTES[path]
        if f"self.{name} = " not in source and f"self.{name}: " not in source
    ]  # fmt: skip
    assert missing == []


def test_the_batch_names_its_requests_in_the_order_of_their_rows():
    assert isinstance(found("vllm.v1.worker.gpu_input_batch:InputBatch.req_ids"), property)


def test_a_request_counts_its_output():
    assert isinstance(found("vllm.v1.request:Request.num_output_tokens"), property)


def test_the_cpu_worker_is_the_gpu_worker_and_builds_on_its_runner():
    assert issubclass(
        found("vllm.v1.worker.cpu_worker:CPUWorker"), found("vllm.v1.worker.gpu_worker:Worker")
    )
    assert issubclass(
        found("vllm.v1.worker.cpu_model_runner:CPUModelRunner"),
        found("vllm.v1.worker.gpu_model_runner:GPUModelRunner"),
    )
    for name in ("load_model", "execute_model", "sample_tokens", "shutdown"):
        assert name not in vars(found("vllm.v1.worker.cpu_worker:CPUWorker")), name


def test_the_reload_is_finished_by_the_function_whose_signature_is_checked():
    reload = found("vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_reload")
    assert "finalize_layerwise_processing(*args, **kwargs)" in inspect.getsource(reload)


def test_the_drafter_proposes_as_many_tokens_as_the_step_says():
    source = inspect.getsource(found("vllm.v1.worker.gpu_model_runner:GPUModelRunner"))
    assert "scheduler_output.num_spec_tokens_to_schedule" in source


def test_the_output_handler_takes_the_processor_when_it_starts():
    """So exchanging it just before is in time."""
    source = inspect.getsource(found("vllm.v1.engine.async_llm:AsyncLLM._run_output_handler"))
    assert source.index("if self.output_handler is not None") < source.index(
        "output_processor = self.output_processor"
    ) < source.index("async def output_handler")  # fmt: skip


def test_a_pause_that_keeps_requests_computes_them_again_from_their_first_token():
    """The preempted keep their tokens and lose their blocks, and nothing is scheduled meanwhile."""
    core = inspect.getsource(found("vllm.v1.engine.core:EngineCore._finish_pause"))
    assert "self._reset_caches()" in core
    defaults = inspect.signature(found("vllm.v1.engine.core:EngineCore._reset_caches")).parameters
    assert defaults["reset_running_requests"].default is True
    assert defaults["reset_connector"].default is True
    reset = inspect.getsource(found("vllm.v1.core.sched.scheduler:Scheduler.reset_prefix_cache"))
    assert "while self.running:" in reset
    assert "self._preempt_request(" in reset
    preempt = inspect.getsource(found("vllm.v1.core.sched.scheduler:Scheduler._preempt_request"))
    assert "request.num_computed_tokens = 0" in preempt
    assert "request.spec_token_ids = []" in preempt
    schedule = inspect.getsource(found("vllm.v1.core.sched.scheduler:Scheduler.schedule"))
    assert "self._pause_state == PauseState.PAUSED_ALL" in schedule


def test_a_steps_output_carries_the_weight_version_that_sampled_it():
    step = inspect.getsource(found("vllm.v1.engine.core:EngineCore.step"))
    assert step.index("self.scheduler.update_from_output(") < step.index(
        "self._attach_weight_version(engine_core_outputs)"
    )
    processor = found("vllm.v1.engine.output_processor:OutputProcessor.process_outputs")
    source = inspect.getsource(processor)
    assert source.index("req_state.track_weight_version(weight_version)") < source.index(
        "req_state.detokenizer.update("
    )
    track = found("vllm.v1.engine.output_processor:RequestState.track_weight_version")
    assert "(weight_version, self.detokenizer.num_output_tokens())" in inspect.getsource(track)


def test_several_prompts_are_numbered_at_the_end_of_their_ids():
    serving = found("vllm.entrypoints.openai.completion.serving")
    assert 'request_id_item = f"{request_id}-{i}"' in inspect.getsource(serving)


def test_routes_that_change_weights_are_off_unless_developing():
    routers = inspect.getsource(found("vllm.entrypoints.launchers.api_server.routers"))
    assert "if envs.VLLM_SERVER_DEV_MODE:" in routers


def test_every_end_of_a_request_goes_through_the_methods_that_are_watched():
    """``request_states`` loses an entry in ``_finish_request`` and ``abort_requests`` only."""
    kind = found("vllm.v1.engine.output_processor:OutputProcessor")
    removing = [
        name for name, method in inspect.getmembers(kind, inspect.isfunction)
        if "request_states.pop(" in inspect.getsource(method)
    ]  # fmt: skip
    assert set(removing) <= {"_finish_request", "abort_requests"}


def test_the_sampler_looks_the_repaired_function_up_when_it_needs_it():
    """Replacing the module's attribute replaces what is called."""
    module = found("vllm.v1.sample.rejection_sampler")
    assert module.apply_sampling_constraints.__globals__ is vars(module)
    assert "expand_batch_to_tokens(" in inspect.getsource(module.apply_sampling_constraints)


@pytest.mark.skipif(HAS_TRITON, reason="with Triton the shipped function is right")
def test_the_bug_that_is_repaired_is_still_there():
    """When this fails, look whether rlcore.engine.fixes is still needed."""
    source = inspect.getsource(found("vllm.utils.cpu_triton_utils:_expand_kernel_impl"))
    assert "_ensure_int64(output)" in source
    assert "copy_(" not in source


def test_the_command_line_has_the_options_that_are_set():
    parser = found("vllm.entrypoints.launchers.cli_args:make_arg_parser")(
        found("vllm.utils.argparse_utils:FlexibleArgumentParser")(exit_on_error=False)
    )
    args = parser.parse_args(["some/model"])
    needed = {
        "model", "served_model_name", "host", "port", "dtype", "max_model_len", "enforce_eager",
        "worker_cls", "async_scheduling", "additional_config", "api_key", "speculative_config",
    }  # fmt: skip
    assert needed <= set(vars(args)) | {"model"}


def test_the_app_can_be_wrapped_from_outside():
    from fastapi import FastAPI

    app = FastAPI()
    assert hasattr(app, "middleware_stack")
    assert callable(app.build_middleware_stack())


@pytest.mark.parametrize(
    "path",
    [
        "vllm.platforms:current_platform.is_cpu",
        "vllm.config:set_current_vllm_config",
        "vllm.model_executor.model_loader.reload.layerwise:LOADING_LAYERS",
        "vllm.usage.usage_lib:UsageContext.OPENAI_API_SERVER",
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead",
    ],
)
def test_a_name_exists(path):
    assert found(path) is not None


def test_the_environment_variables_that_are_set_are_read():
    known = found("vllm.envs:environment_variables")
    assert {
        "VLLM_USE_V2_MODEL_RUNNER", "VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL",
    } <= set(known)  # fmt: skip
