"""One completion by the engine's front side, without HTTP: tokens in, tokens out.

Read against vLLM 0.32.0: ``AsyncLLM.generate`` aborts its request when it is cancelled; a finished
``CompletionOutput`` says from which token on each weight version sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rlcore.engine.frontend import EngineUnavailable, PacelineLLM
from rlcore.errors import PacelineError
from rlcore.records.trace import Sampling


class EngineLost(PacelineError):
    """The engine has ended, or ends."""


class RequestRefused(PacelineError):
    """vLLM does not take the request."""


@dataclass(frozen=True)
class Sampled:
    """The three lists are equally long."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token, under the distribution that it was sampled from (``--logprobs-mode
    processed_logprobs``)."""
    policy_versions: list[int]
    finish_reason: str


async def sample(
    llm: PacelineLLM,
    name: str,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    priority: int,
) -> Sampled:
    """Until an end-of-sequence token or ``max_tokens``; cancel to abort.

    ``name``: of the request, any that no other running one has. Raises EngineLost or RequestRefused.
    """
    parameters = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        max_tokens=max_tokens,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    prompt = {"prompt_token_ids": list(prompt_ids)}
    try:
        async for output in llm.generate(prompt, parameters, name, priority=priority):
            final = output.outputs[0]
    except (EngineDeadError, EngineGenerateError, EngineUnavailable) as error:
        raise EngineLost(f"the engine is gone ({type(error).__name__})") from None
    except (VLLMClientError, ValueError) as error:
        raise RequestRefused(f"the engine refused a request: {error}") from None
    token_ids = list(final.token_ids)
    found = [at[token].logprob for at, token in zip(final.logprobs or [], token_ids, strict=True)]
    if not all(math.isfinite(value) for value in found):
        raise RequestRefused("a log-probability is not finite")
    versions: list[int] = []
    for span in final.weight_versions or []:
        versions[span.start :] = [int(span.version)] * (len(token_ids) - span.start)
    return Sampled(token_ids, [min(0.0, v) for v in found], versions, str(final.finish_reason))
