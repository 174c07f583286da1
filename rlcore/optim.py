"""The optimizer of all learning here: Muon for hidden matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

NOT_HIDDEN = ("embed", "lm_head")
"""Parameters with these in their names map to or from the vocabulary, and go to AdamW."""


class MuonAdamW:
    """``torch.optim.Muon`` and ``torch.optim.AdamW`` behind one interface.

    Takes named parameters, those that require a gradient, and keeps its state by their names.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        muon_lr: float = 0.03,
        adamw_lr: float = 0.002,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        newton_schulz_steps: int = 5,
    ) -> None:
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in self.parameters.items():
            matrix = parameter.ndim == 2 and not any(part in name for part in NOT_HIDDEN)
            (hidden if matrix else rest).append(parameter)
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if hidden:
            muon = torch.optim.Muon(
                hidden,
                lr=muon_lr,
                weight_decay=weight_decay,
                momentum=momentum,
                ns_steps=newton_schulz_steps,
            )
            self._parts.append((muon, muon_lr))
        if rest:
            adamw = torch.optim.AdamW(rest, lr=adamw_lr, weight_decay=weight_decay, betas=betas)
            self._parts.append((adamw, adamw_lr))

    def step(self, scale: float = 1.0) -> None:
        """One step at ``scale`` times the learning rates."""
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.step()

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The state as ``<parameter>.<key>``; views, so copy what must outlive the next step."""
        names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        return {
            f"{names[parameter]}.{key}": tensor
            for optimizer, _ in self._parts
            for parameter, state in optimizer.state.items()
            for key, tensor in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what ``state_tensors`` gave; raises KeyError on a parameter that is not here."""
        states: dict[str, dict[str, Any]] = {}
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition(".")
            states.setdefault(name, {})[key] = tensor.clone()
        unknown = states.keys() - self.parameters.keys()
        if unknown:
            raise KeyError(f"optimizer state of unknown parameters: {sorted(unknown)}")
        names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        for optimizer, _ in self._parts:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if names[parameter] in states:
                        optimizer.state[parameter] = states[names[parameter]]
