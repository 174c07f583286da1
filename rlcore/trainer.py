"""The training loop of the project: draft learning and policy RL both run this one.

It knows nothing of algorithms. An objective turns the module and one micro-batch into a summed loss
and the weight that the sum is to be divided by; the trainer accumulates, normalises, clips, steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rlcore.optim import MuonAdamW

M = TypeVar("M", bound=nn.Module)
B = TypeVar("B")
M_contra = TypeVar("M_contra", bound=nn.Module, contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)


@dataclass(frozen=True)
class LossOutput:
    """What an objective returns for one micro-batch.

    The loss of an update is the sum of all ``loss_sum`` over the sum of all ``weight`` (a token
    count), so that it does not depend on how the batch was cut up. ``metrics`` maps a name to
    (sum, weight) and is averaged likewise.
    """

    loss_sum: Tensor
    weight: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)


class Objective(Protocol[M_contra, B_contra]):
    def __call__(self, module: M_contra, batch: B_contra, /) -> LossOutput: ...


@dataclass(frozen=True)
class Schedule:
    """The learning rate's factor as a function of the update number alone (0 is the first).

    Linear warm-up over ``warmup`` updates, then constant; with ``decay`` > 0, a cosine over as many
    updates down to ``floor``, which is kept from there on.
    """

    warmup: int = 0
    decay: int = 0
    floor: float = 0.1

    def factor(self, update: int) -> float:
        if update < self.warmup:
            return (update + 1) / self.warmup
        if self.decay == 0:
            return 1.0
        progress = min(1.0, (update - self.warmup) / self.decay)
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class UpdateMetrics:
    """``skipped`` says why no step was taken: ``empty``, ``loss`` or ``gradient`` (not finite)."""

    update: int
    loss: float
    weight: float
    grad_norm: float
    lr_factor: float
    skipped: str | None
    metrics: dict[str, float]


class Trainer(Generic[M, B]):
    """Trains ``module`` in place. ``generator`` is for the caller's own draws (batch order and the
    like): it is saved and restored with the rest, which makes a resumed run bit-exact.

    ``average_half_life`` in updates: also keep an exponential moving average of the trained
    parameters, which stands in for a decayed learning rate while the rate itself stays high. It is
    what ``averaged`` shows; 0 keeps none.
    """

    def __init__(
        self,
        module: M,
        objective: Objective[M, B],
        optimizer: MuonAdamW,
        schedule: Schedule | None = None,
        max_grad_norm: float = 1.0,
        average_half_life: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.module = module
        self.objective = objective
        self.optimizer = optimizer
        self.schedule = schedule or Schedule()
        self.max_grad_norm = max_grad_norm
        self.average_half_life = average_half_life
        self.lr_scale = 1.0
        """Multiplies the schedule's factor; for a controller to set."""
        self.average: dict[str, Tensor] = {}
        """The moving average by parameter name; empty when none is kept."""
        if average_half_life > 0:
            self.average = {k: p.detach().clone() for k, p in optimizer.parameters.items()}
        self.generator = torch.Generator().manual_seed(seed)
        self.updates = 0
        """Steps taken; skipped updates do not count."""
        self.weight_seen = 0.0
        self.skipped: dict[str, int] = {}

    def update(self, micro_batches: Iterable[B]) -> UpdateMetrics:
        """One optimizer step over all the micro-batches together."""
        self.optimizer.zero_grad()
        loss_sum, weight = 0.0, 0.0
        sums: dict[str, tuple[float, float]] = {}
        for batch in micro_batches:
            output = self.objective(self.module, batch)
            if output.weight == 0:
                continue
            loss = float(output.loss_sum.detach())
            loss_sum += loss
            weight += output.weight
            for name, (total, count) in output.metrics.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + count)
            if not math.isfinite(loss):
                break
            output.loss_sum.backward()
        averages = {name: total / count for name, (total, count) in sums.items() if count}
        if weight == 0:
            return self._skip("empty", math.nan, 0.0, math.nan, averages)
        if not math.isfinite(loss_sum):
            return self._skip("loss", loss_sum, weight, math.nan, averages)
        grad_norm = self._normalise_and_clip(weight)
        if not math.isfinite(grad_norm):
            return self._skip("gradient", loss_sum / weight, weight, grad_norm, averages)
        factor = self._lr_factor()
        self.optimizer.step(factor)
        self.optimizer.zero_grad()
        self.updates += 1
        self._follow()
        self.weight_seen += weight
        return UpdateMetrics(
            self.updates, loss_sum / weight, weight, grad_norm, factor, None, averages
        )

    def _normalise_and_clip(self, weight: float) -> float:
        """Turns summed gradients into the clipped mean's; returns the norm before clipping."""
        grads = [p.grad for p in self.optimizer.parameters.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) / weight
        if math.isfinite(norm):
            torch._foreach_mul_(grads, min(1.0, self.max_grad_norm / (norm + 1e-6)) / weight)
        return norm

    def _skip(
        self, why: str, loss: float, weight: float, norm: float, metrics: dict[str, float]
    ) -> UpdateMetrics:
        self.optimizer.zero_grad()
        self.skipped[why] = self.skipped.get(why, 0) + 1
        return UpdateMetrics(self.updates, loss, weight, norm, self._lr_factor(), why, metrics)

    def _lr_factor(self) -> float:
        return self.lr_scale * self.schedule.factor(self.updates)

    @torch.no_grad()
    def _follow(self) -> None:
        """Moves the average towards the parameters; early on it looks back less far."""
        if self.average:
            share = max(1 - 0.5 ** (1 / self.average_half_life), 9 / (self.updates + 9))
            torch._foreach_lerp_(
                list(self.average.values()), list(self.optimizer.parameters.values()), share
            )

    @contextmanager
    def averaged(self) -> Iterator[M]:
        """The module with the averaged parameters in place; those in training come back after it.

        Nothing may be trained or loaded meanwhile. Without an average it is the module as it is.
        """
        self._swap()
        try:
            yield self.module
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, average in self.average.items():
            parameter = self.optimizer.parameters[name]
            self.average[name], parameter.data = parameter.data, average

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Flat tensors (copies) and a JSON-able dict; together they resume the run bit for bit.

        The tensors are ``module.*`` (trained parameters), ``average.*`` (theirs, if one is kept),
        ``optimizer.*`` and ``rng.*`` (this trainer's generator and torch's default one).
        """
        tensors = {f"module.{k}": v.detach() for k, v in self.optimizer.parameters.items()}
        tensors |= {f"average.{k}": v for k, v in self.average.items()}
        tensors |= {f"optimizer.{k}": v for k, v in self.optimizer.state_tensors().items()}
        tensors["rng.generator"] = self.generator.get_state()
        tensors["rng.torch"] = torch.get_rng_state()
        counters = {
            "updates": self.updates,
            "weight_seen": self.weight_seen,
            "skipped": dict(self.skipped),
            "lr_scale": self.lr_scale,
        }
        return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, counters

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Any]) -> None:
        """Takes what ``state`` gave. Raises KeyError when the parameters are not this module's.

        The schedule, the gradient's bound and whether an average is kept are this trainer's own: state
        without an average starts it at the parameters.
        """
        parts: dict[str, dict[str, Tensor]] = {
            "module": {}, "average": {}, "optimizer": {}, "rng": {},
        }  # fmt: skip
        for full_name, tensor in tensors.items():
            part, _, name = full_name.partition(".")
            parts[part][name] = tensor
        if parts["module"].keys() != self.optimizer.parameters.keys():
            names = parts["module"].keys() ^ self.optimizer.parameters.keys()
            raise KeyError(f"parameters differ: {sorted(names)}")
        with torch.no_grad():
            for name, parameter in self.optimizer.parameters.items():
                parameter.copy_(parts["module"][name])
            for name, average in self.average.items():
                average.copy_(parts["average"].get(name, parts["module"][name]))
        self.optimizer.load_state_tensors(parts["optimizer"])
        self.generator.set_state(parts["rng"]["generator"])
        torch.set_rng_state(parts["rng"]["torch"])
        self.updates = counters["updates"]
        self.weight_seen = counters["weight_seen"]
        self.skipped = dict(counters["skipped"])
        self.lr_scale = counters["lr_scale"]
