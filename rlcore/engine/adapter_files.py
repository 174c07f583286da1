"""LoRA adapters that are named at the start, looked at before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from rlcore.errors import PacelineError
from rlcore.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightError, signature

FACTORS = (".lora_A.weight", ".lora_B.weight")
HEADS = ("lm_head", "embed_out", "output")
"""Names of output layers, which are linear too."""

MAX_HEADER = 64 * 1024**2
"""Bytes of a file's list of tensors."""


class AdapterError(PacelineError):
    """An adapter that cannot be served."""


def check_adapter(name: str, folder: Path) -> None:
    """Raises AdapterError unless ``folder`` holds an adapter of linear layers only.

    A drafter shares the target's embedding, and traces are judged by its head.
    """
    path = folder / ADAPTER_WEIGHTS
    if not (folder / ADAPTER_CONFIG).is_file() or not path.is_file():
        raise AdapterError(
            f"adapter {name}: {folder} holds no {ADAPTER_CONFIG} or no {ADAPTER_WEIGHTS}"
        )
    try:
        with open(path, "rb") as file:
            tensors = signature(file.read(MAX_HEADER))
    except (OSError, WeightError) as error:
        raise AdapterError(f"adapter {name}: {path} cannot be read: {error}") from None
    for tensor in tensors:
        module = tensor.split(".lora_")[0].rpartition(".")[2]
        if ".base_layer." in tensor:
            continue  # saved beside them, and not used
        if not tensor.endswith(FACTORS) or module in HEADS:
            raise AdapterError(
                f"adapter {name}: {folder} changes {tensor.removeprefix('base_model.model.')}; only linear "
                "layers of the decoder can be adapted, for the drafter shares the embedding and learns by "
                "the head"
            )
