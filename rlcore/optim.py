"""The optimizer of all learning here: Muon for hidden matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.precision import bfloat16_is_fast

NOT_HIDDEN = ("embed", "lm_head")
"""Parameters with these in their names map to or from the vocabulary, and go to AdamW."""

# Amsel et al. 2025, "The Polar Express": each polynomial is the best one behind those before it.
# Divided so that rounding does not push a singular value out of the interval of convergence.
_SAFETY = 1.01
POLAR_EXPRESS = [
    (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
]


def orthogonalise(matrix: Tensor, steps: int) -> Tensor:
    """About U V^T of ``matrix`` [m, n] = U S V^T, in bfloat16 where that is fast.

    ``steps`` odd polynomials of degree five; each costs 4 m^2 n + 2 m^3 operations (m <= n). Small
    singular values are left short of 1. (Iterating on X X^T alone costs less, but in bfloat16 its
    rounding errors grow without bound where X is of low rank.)
    """
    fast = matrix.is_cuda or bfloat16_is_fast()
    x = matrix.to(torch.bfloat16 if fast else torch.float32)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    # 1e-7 keeps a matrix of zeros what it is.
    x = x / (_SAFETY * matrix.norm() + 1e-7).to(x.dtype)
    for a, b, c in POLAR_EXPRESS[:steps]:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def orthogonalise_blocks(matrix: Tensor, steps: int, block: int | None) -> Tensor:
    """``orthogonalise`` of pieces of the shorter side, each about ``block`` wide; None: the whole.

    The time grows with the square of that side, and is most of an update's when batches are small.
    """
    if block is None:
        return orthogonalise(matrix, steps)
    side = 0 if matrix.shape[0] <= matrix.shape[1] else 1
    pieces = max(1, round(matrix.shape[side] / block))
    return torch.cat([orthogonalise(p, steps) for p in matrix.chunk(pieces, side)], dim=side)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised (Jordan et al. 2024), in at most five ``steps``.

    ``torch.optim.Muon`` has one polynomial for all steps and needs more of them, and no blocks.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        steps: int,
        block: int | None,
    ) -> None:
        if not 1 <= steps <= len(POLAR_EXPRESS):
            raise ValueError(f"{steps} steps to orthogonalise; 1 to {len(POLAR_EXPRESS)} are known")
        self._steps, self._block = steps, block
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Consumes the gradients: they are overwritten."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                momentum = parameter.grad.lerp_(average, group["momentum"])
                direction = orthogonalise_blocks(momentum, self._steps, self._block)
                rows, columns = parameter.shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction.to(parameter.dtype), alpha=-rate)


class MuonAdamW:
    """``Muon`` and ``torch.optim.AdamW`` behind one interface.

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
        orthogonalise_steps: int = 3,
        orthogonalise_block: int | None = None,
        adamw_only: bool = False,
    ) -> None:
        """``adamw_only``: no Muon, as is usual where a trained model is only moved a little."""
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        hidden: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in self.parameters.items():
            matrix = parameter.ndim == 2 and not any(part in name for part in NOT_HIDDEN)
            (hidden if matrix and not adamw_only else rest).append(parameter)
        self._parts: list[tuple[torch.optim.Optimizer, float]] = []
        if hidden:
            muon = Muon(
                hidden,
                lr=muon_lr,
                weight_decay=weight_decay,
                momentum=momentum,
                steps=orthogonalise_steps,
                block=orthogonalise_block,
            )
            self._parts.append((muon, muon_lr))
        if rest:
            adamw = torch.optim.AdamW(
                rest, lr=adamw_lr, weight_decay=weight_decay, betas=betas, fused=True
            )
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
