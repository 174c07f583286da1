"""Drives vLLM's offline LLM with our worker: one job (JSON) in, one list of results (JSON) out.

As a script: ``python -m tests.e2e.offline JOB OUT``. As a module: ``run(job)`` does that in a process
of its own. A job holds ``model``, ``worker``, ``draft`` (None: no speculation), ``method``, ``k`` and
``actions``, each a list of a name and its arguments:

``scheduler`` (None: the product's) and ``worker`` are class paths. With a ``rank`` the policy's versions
are adapters up to it, and requests may name others.

- ``generate``: requests (token ids and sampling parameters), and swaps by engine step. The engine
  core runs inside the driving process, so a swap lands between two chosen steps of running requests.
- ``swap``: folder, version of a drafter.
- ``policy``: folder, version of the target.
- ``rpc``: method, arguments.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE = 400.0
WORKER = "tests.e2e.faulty_worker.FaultyWorker"


def job(model: Path, draft: Path | None, method: str, k: int, **more: Any) -> dict[str, Any]:
    return {
        "model": str(model), "draft": draft and str(draft), "method": method, "k": k,
        "max_model_len": 256, "max_num_seqs": 64, "worker": WORKER, "scheduler": None, "rank": 0,
        **more,
    }  # fmt: skip


def generate(
    prompts: list[list[int]],
    sampling: list[dict[str, Any]],
    swaps: dict[int, tuple] | None = None,
    policies: dict[int, tuple] | None = None,
    adapters: list[Path | None] | None = None,
) -> tuple[str, dict[str, Any]]:
    """One sampling dict for each prompt; ``swaps`` and ``policies`` map an engine step to (folder,
    version); ``adapters``: that each prompt's request names, by its folder."""
    return "generate", {
        "adapters": [folder and str(folder) for folder in adapters or [None] * len(prompts)],
        "prompts": prompts,
        "sampling": sampling,
        "swaps": {str(step): [str(f), v] for step, (f, v) in (swaps or {}).items()},
        "policies": {str(step): [str(f), v] for step, (f, v) in (policies or {}).items()},
    }


def swap(folder: Path, version: int, sha256: str | None = None) -> tuple[str, dict[str, Any]]:
    return "swap", {"folder": str(folder), "version": version, "sha256": sha256}


def policy(folder: Path, version: int, sha256: str | None = None) -> tuple[str, dict[str, Any]]:
    return "policy", {"folder": str(folder), "version": version, "sha256": sha256}


def rpc(method: str, *args: Any) -> tuple[str, dict[str, Any]]:
    return "rpc", {"method": method, "args": args}


def run(given: dict[str, Any], actions: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The result of each action."""
    with tempfile.TemporaryDirectory() as folder:
        given_path, out = Path(folder) / "job.json", Path(folder) / "out.json"
        given_path.write_text(json.dumps(given | {"actions": actions}))
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Threads that wait for each other crawl where more processes run than there are cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "TOKENIZERS_PARALLELISM": "false",
        }
        openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.e2e.offline", given_path, out],
            env=environment, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
        if done.returncode != 0 or not out.exists():
            raise RuntimeError(f"the engine ended with {done.returncode}:\n{done.stderr[-6000:]}")
        return json.loads(out.read_text())


class Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        from vllm import LLM

        from rlcore.engine.launch import SCHEDULER_CLASS, speculative_config
        from rlcore.engine.options import EngineOptions

        options = EngineOptions(
            target_version=0, draft_version=0, draft_rates=[], speculation="fixed",
            link_endpoint=f"ipc://{tempfile.mkdtemp()}/link", trace_endpoint=None, capture_rate=0.0,
            capture_span_tokens=2048, capture_queue=256, policy_rank=given["rank"],
        )  # fmt: skip
        lora: dict[str, Any] = {}
        if given["rank"]:
            lora = {"enable_lora": True, "max_lora_rank": given["rank"], "max_loras": 3}
        speculative = None
        if given["draft"] is not None:
            speculative = speculative_config(
                given["method"], Path(given["draft"]), given["k"], given["scheduler"] is not None
            )
        self.llm = LLM(
            model=given["model"], dtype="float32", enforce_eager=True, async_scheduling=False,
            max_model_len=given["max_model_len"], max_num_seqs=given["max_num_seqs"],
            skip_tokenizer_init=True, worker_cls=given["worker"], seed=0,
            scheduler_cls=given["scheduler"] or SCHEDULER_CLASS,
            additional_config=options.to_config(), speculative_config=speculative, **lora,
        )  # fmt: skip
        self._rank = given["rank"]
        self._core = self.llm.llm_engine.engine_core.engine_core
        self._core.set_weight_version("0")
        self._requests = 0

    def _adapter(self, folder: str | None) -> Any:
        """As the front side has it: a request that names none has the policy's."""
        from vllm.lora.request import LoRARequest

        from rlcore.engine.adapters import POLICY_ADAPTER

        if folder is None:
            return POLICY_ADAPTER if self._rank else None
        number = 1 + sum(Path(folder).name.encode())  # the same for the same name
        return LoRARequest(Path(folder).name, number, folder)

    def generate(self, prompts, sampling, swaps, policies, adapters) -> dict[str, Any]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        order = []
        for ids, params, adapter in zip(prompts, sampling, adapters, strict=True):
            order.append(f"r{self._requests:06d}")
            self._requests += 1
            engine.add_request(
                order[-1],
                {"prompt_token_ids": ids},
                SamplingParams(**params, ignore_eos=True, detokenize=False),
                lora_request=self._adapter(adapter),
            )
        done: dict[str, Any] = {}
        reports = []
        steps = 0
        while engine.has_unfinished_requests():
            if (planned := swaps.get(str(steps))) is not None:
                running = engine.get_num_unfinished_requests()
                reports.append(self.swap(*planned) | {"running": running})
            if (planned := policies.get(str(steps))) is not None:
                reports.append(self.policy(*planned))
            for output in engine.step():
                if output.finished:
                    done[output.request_id] = output.outputs[0]
            steps += 1
        return {
            "tokens": [list(done[r].token_ids) for r in order],
            "logprobs": [
                [{str(t): lp.logprob for t, lp in at.items()} for at in done[r].logprobs or []]
                for r in order
            ],
            "versions": [
                [(span.start, int(span.version)) for span in done[r].weight_versions] for r in order
            ],
            "swaps": reports,
            "steps": steps,
        }

    def swap(self, folder: str, version: int, sha256: str | None = None) -> dict[str, Any]:
        arguments = (folder, sha256 or digest(folder), version, [])
        return self.llm.collective_rpc("paceline_swap", args=arguments)[0]

    def policy(self, folder: str, version: int, sha256: str | None = None) -> dict[str, Any]:
        """What rlcore.engine.policy_swap does, in this process; the last report."""
        report = self.rpc("paceline_policy_stage", [folder, sha256 or digest(folder), version])
        while report["error"] is None and not report["ready"]:
            time.sleep(0.01)
            report = self.rpc("paceline_policy_staged", [version])
        if report["error"] is not None:
            return report
        self._core.pause_scheduler("keep", clear_cache=True)
        try:
            report = self.rpc("paceline_policy_apply", [version])
            if report["error"] is None:
                self._core.set_weight_version(str(version))
        finally:
            self._core.resume_scheduler()
        return report

    def rpc(self, method: str, args: list[Any]) -> Any:
        return self.llm.collective_rpc(method, args=tuple(args))[0]


def digest(folder: str) -> str:
    names = ("adapter_model.safetensors", "model.safetensors")
    path = next(p for p in (Path(folder) / name for name in names) if p.exists())
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(given)
    results = [getattr(engine, name)(**arguments) for name, arguments in given["actions"]]
    Path(sys.argv[2]).write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to say, and vLLM takes seconds to go


if __name__ == "__main__":
    main()
