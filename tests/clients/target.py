"""A target for self-play without a model; with ``fake_paceline``, all of the commands that it needs."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jinja2
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '" + SYSTEM + "' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The embedded model's."""


class Target:
    """``how``: ``well``, ``same`` (always the same prompt), ``hang``, or ``refuse``."""

    def __init__(self, template: str | None = CHATML, how: str = "well") -> None:
        self.app = FastAPI()
        self.app.get("/ready")(lambda: "")
        self.app.get("/v1/models")(self.models)
        self.app.post("/tokenize", response_model=None)(self.tokenize)
        self.app.post("/detokenize")(self.detokenize)
        self.app.post("/v1/completions", response_model=None)(self.complete)
        self.app.post("/v1/chat/completions", response_model=None)(self.chat)
        self.url = ""
        self.completions: list[dict[str, Any]] = []
        self.asked: list[list[dict[str, str]]] = []
        self._template = template
        self._how = how
        self._numbers = itertools.count()

    async def models(self) -> dict[str, Any]:
        model = {"id": "target", "object": "model", "created": 0, "owned_by": "x"}
        return {"object": "list", "data": [model]}

    async def tokenize(self, request: Request) -> dict[str, Any] | JSONResponse:
        """A token a character."""
        body = await request.json()
        if self._template is None:
            message = "As of transformers v4.44, default chat template is no longer allowed.\nMore."
            return JSONResponse({"error": {"message": message, "code": 400}}, status_code=400)
        text = jinja2.Template(self._template, keep_trailing_newline=True).render(
            messages=body["messages"], add_generation_prompt=body.get("add_generation_prompt", True)
        )
        return {"tokens": [ord(c) for c in text], "count": len(text), "max_model_len": 4096}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        return {"prompt": "".join(map(chr, body["tokens"]))}

    async def complete(self, request: Request) -> JSONResponse:
        self.completions.append(await request.json())
        if self._how == "refuse":
            return JSONResponse({"error": {"message": "engine died"}}, status_code=500)
        number = 0 if self._how == "same" else next(self._numbers)
        text = "said again and again" if self._how == "same" else f"and this is number {number}"
        choice = {"index": 0, "text": text, "finish_reason": "stop"}
        return JSONResponse(_response("text_completion", choice))

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        if self._how == "hang":
            await asyncio.sleep(60)
        self.asked.append(body["messages"])
        message = {"role": "assistant", "content": "an answer"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(_response("chat.completion", choice))


def _response(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
    return {
        "id": "a", "object": kind, "created": 0, "model": "target", "choices": [choice],
        "usage": usage,
    }  # fmt: skip


def fake_paceline(folder: Path) -> Path:
    """An executable in place of ``paceline``: serves, records and learns nothing."""
    script = folder / "paceline"
    root = Path(__file__).parents[2]
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(root)!r})\n"
        "from tests.clients.target import main\nmain(sys.argv[1:])\n"
    )
    script.chmod(0o755)
    return script


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--port", "--seed"):
        parser.add_argument(flag, type=int)
    for flag in ("--home", "--out"):
        parser.add_argument(flag, type=Path)
    args, _ = parser.parse_known_args([word for word in argv[1:] if word != "--"])
    if argv[0] == "serve":
        print(argv, "bound to", os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), flush=True)
        how = os.environ.get(f"FAKE_{args.home.name}", "well")
        uvicorn.run(Target(how=how).app, port=args.port, log_level="warning")
    elif argv[0] == "record":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        args.out.write_text("traces")
        signal.pause()
    else:
        args.out.mkdir()
        (args.out / "argv").write_text("\n".join(argv))
