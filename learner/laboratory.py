"""The laboratory: every choice in draft learning is decided here, on recorded traffic.

    python -m learner.laboratory --replay FILE... --table OUT.json [--markdown OUT.md]

A variant is a set of named changes to the learner's own settings; each is trained from the same
untrained drafter on the same stream, and judged on the same held-out prompts. Runs are determined by
their seed. What is finished is in the table and is not run again.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from learner.drafters.eagle3 import Eagle3
from learner.estimate import SpanLengths
from learner.judging import conditional_rates, score_spans
from learner.lab_data import HELDOUT_SHARE, LaboratoryError, Traffic, batches, read_traffic
from learner.lab_table import Result, Table, markdown
from learner.objectives.named import RECIPES
from learner.session import TrainingSession, keep_freed_memory, use_threads
from learner.target import Target
from learner.vocabulary import TrafficCounts
from rlcore.errors import PacelineError
from rlcore.home import Home, default_home
from rlcore.log import get_logger, setup_logging
from rlcore.settings import DrafterSettings
from rlcore.target import local_model, model_identity

log = get_logger("laboratory")

STEPS = 3
"""K: drafts a step, in training and in judging."""


@dataclass(frozen=True)
class Variant:
    """``settings`` are changes to the learner's settings."""

    note: str
    settings: dict[str, Any] = field(default_factory=dict)
    draft_vocab: int = 4096


OBJECTIVES = {
    name: Variant(known.note, settings={"objective": name}) for name, known in RECIPES.items()
}

VARIANTS: dict[str, Variant] = OBJECTIVES | {
    "unroll-1": Variant("no unroll: the first draft only", settings={"unroll": 1}),
    "unroll-2": Variant("two of three drafts unrolled", settings={"unroll": 2}),
    "batch-128": Variant("updates of 128 positions", settings={"batch_tokens": 128}),
    "batch-512": Variant("updates of 512 positions", settings={"batch_tokens": 512}),
    "matrix-0.02": Variant("Muon at 0.02", settings={"lr_matrix": 0.02}),
    "matrix-0.05": Variant("Muon at 0.05", settings={"lr_matrix": 0.05}),
    "other-0.001": Variant("AdamW at 0.001", settings={"lr_other": 0.001}),
    "other-0.004": Variant("AdamW at 0.004", settings={"lr_other": 0.004}),
    "vocab-2048": Variant("a draft vocabulary of 2048", draft_vocab=2048),
    "vocab-8192": Variant("a draft vocabulary of 8192", draft_vocab=8192),
}
"""Everything compared; the objectives differ in nothing else, the other variants
have the default objective."""


def start_session(
    variant: Variant, settings: DrafterSettings, target: Target, traffic: Traffic
) -> TrainingSession:
    """An untrained drafter whose vocabulary is chosen from the training traffic."""
    counts = TrafficCounts(target.vocab_size)
    for span in traffic.training:
        counts.add(span)
    drafter = Eagle3.build(target, variant.draft_vocab, counts.counts, seed=settings.seed)
    return TrainingSession(drafter, target, settings)


def run_variant(
    name: str, seed: int, counts: Sequence[int], target: Target, traffic: Traffic, table: Table
) -> None:
    """Train up to the largest of ``counts`` and judge at each that the table has not."""
    settings = DrafterSettings(seed=seed, speculative_tokens=STEPS, **VARIANTS[name].settings)
    session = start_session(VARIANTS[name], settings, target, traffic)
    stream = batches(traffic.training, settings.batch_tokens, seed)
    for count in sorted(counts):
        losses = []
        started = time.monotonic()
        before = session.tokens_seen
        while session.tokens_seen < count:
            metrics = session.update(next(stream))
            if metrics.skipped is not None:
                log.warning("an update was skipped", variant=name, reason=metrics.skipped)
            losses.append(metrics.loss)
        speed = (session.tokens_seen - before) / (time.monotonic() - started)
        if table.has(name, seed, count):
            continue
        with session.candidate() as drafter:
            lengths = score_spans(drafter, traffic.heldout, STEPS)
        result = Result(
            variant=name,
            seed=seed,
            tokens=count,
            trained=session.tokens_seen,
            updates=session.trainer.updates,
            **_figures(lengths),
            loss=fmean(losses) if losses else math.nan,
            positions_per_second=speed,
        )
        table.add(result)
        log.info("judged", variant=name, seed=seed, tokens=count, length=round(result.length, 4))


def _figures(lengths: Sequence[SpanLengths]) -> dict[str, Any]:
    """Acceptance length with the standard error of a ratio over spans (learner/gate.py names the
    source), as walked, and by position."""
    anchors = sum(s.anchors for s in lengths)
    if anchors == 0:
        raise LaboratoryError("the held-out spans are too short to judge by")
    length = sum(s.length_sum for s in lengths) / anchors
    spread = sum((s.length_sum - length * s.anchors) ** 2 for s in lengths)
    return {
        "length": length,
        "length_error": math.sqrt(spread * len(lengths) / max(1, len(lengths) - 1)) / anchors,
        "walked": sum(s.emitted for s in lengths) / sum(s.steps for s in lengths),
        "rates": list(conditional_rates(lengths)),
    }


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    setup_logging("laboratory", False, "INFO")
    deadline = time.monotonic() + 60 * options.minutes
    try:
        _run(options, deadline)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace, deadline: float) -> None:
    names = options.only or list(VARIANTS)
    unknown = sorted(set(names) - VARIANTS.keys())
    if unknown:
        raise LaboratoryError(f"no variant named {', '.join(unknown)}; --help names them")
    folder = local_model(options.target, Home(options.home))
    use_threads(1)
    keep_freed_memory()
    target, target_id = Target.open(folder), model_identity(folder)
    traffic = read_traffic(
        options.replay,
        target_id,
        Eagle3.method,
        len(target.aux_layers) * target.hidden_size,
        max(options.tokens),
        options.heldout_tokens,
    )
    facts = {
        "target": target_id,
        "recordings": [path.name for path in options.replay],
        "training_tokens": traffic.training_tokens,
        "heldout_share": HELDOUT_SHARE,
        "heldout_tokens": traffic.heldout_tokens,
        "heldout_spans": len(traffic.heldout),
        "steps": STEPS,
    }
    log.info("traffic read", **facts)
    table = Table(options.table, facts)
    for seed in options.seeds:
        for name in names:
            missing = [n for n in options.tokens if not table.has(name, seed, n)]
            if not missing:
                continue
            if time.monotonic() > deadline:
                log.info("out of time; run the same command again to go on")
                return _print(table, options.markdown)
            run_variant(name, seed, missing, target, traffic, table)
    return _print(table, options.markdown)


def _print(table: Table, path: Path | None) -> None:
    text = markdown(table.results, {name: variant.note for name, variant in VARIANTS.items()})
    print(text, end="")
    if path is not None:
        path.write_text(text)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m learner.laboratory", description=__doc__)
    parser.add_argument("--replay", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--table", type=Path, required=True, help="JSON file that grows")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[25_000, 50_000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="start nothing new after that")
    parser.add_argument("--heldout-tokens", type=int, default=10_000)
    parser.add_argument("--target", default="embedded", help="'embedded', a folder, or an id")
    parser.add_argument("--home", type=Path, default=default_home())
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
