"""Judges the weights in training against the live version, and writes down those that win."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import safe_open

from learner.blend import blended
from learner.drafters.base import Drafter, Exported
from learner.gate import FEWEST_SPANS, Judgement, judge
from learner.judging import LiveScores, conditional_rates, gate_scores, score_spans
from learner.live import LiveDraft
from learner.replay import Replay
from learner.session import TrainingSession
from rlcore.log import get_logger
from rlcore.records.versions import DraftManifest
from rlcore.settings import DrafterSettings
from rlcore.weights import WEIGHTS, WeightError, WeightStore

log = get_logger("learner")

SHARES = (1.0, 0.5)
"""Shares of the trained weights in a candidate, the rest being the live version's. A smaller one is
tried when the one before is better as a whole but harms a tenant, or old traffic."""

KEPT_VERSIONS = 4
"""Published versions kept on the learner's side; the server keeps its own."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Publisher:
    """Owns the learner's weight store."""

    def __init__(self, settings: DrafterSettings, store: WeightStore) -> None:
        self._method = settings.method
        self._steps = settings.speculative_tokens
        self._gate_tokens = settings.gate_tokens
        self.store = store
        self._live_scores = LiveScores()
        self._updates_judged = 0
        self.target_version = 0
        """The target's that the traffic is of."""
        self.last_version = 0
        """The highest version number that any side has used."""

    def due(self, session: TrainingSession, replay: Replay) -> bool:
        """Whether there is something new to judge, and enough recent traffic to judge it on."""
        # An anchor with fewer than K known tokens behind it cannot be judged.
        tokens, prompts = 0, set()
        for span in replay.heldout():
            judged = span.anchors - self._steps + 1
            if judged > 0 and replay.heldout_slice(span) == "recent":
                tokens += judged
                prompts.add((span.tenant, span.prompt_hash))
        enough = tokens >= self._gate_tokens and len(prompts) >= FEWEST_SPANS
        return enough and session.trainer.updates not in (0, self._updates_judged)

    def consider(
        self,
        session: TrainingSession,
        live: LiveDraft,
        replay: Replay,
        least_gain: float,
    ) -> tuple[Judgement, DraftManifest | None]:
        """The verdict on the session's present weights, and the version made of them if they won.

        ``least_gain``: acceptance length that pays for a swap.
        """
        self._updates_judged = session.trainer.updates
        for share in SHARES:
            verdict, rates = self._judge(session, live, share, replay, least_gain)
            if not verdict.harms:
                break
        manifest = None
        if verdict.promote:
            with _candidate(session, live.drafter, share) as candidate:
                exported = candidate.export(self._dtype_of(live.version))
            facts = self._facts(session, live.version, verdict, rates, share)
            manifest = self._publish(exported, facts)
        # Behind the judgement, so that tokens that come in are trained before the next one.
        session.follow_traffic()
        return verdict, manifest

    def _judge(
        self,
        session: TrainingSession,
        live: LiveDraft,
        share: float,
        replay: Replay,
        least_gain: float,
    ) -> tuple[Judgement, tuple[float, ...]]:
        """The verdict, and the candidate's conditional acceptance by position."""
        spans = replay.heldout()
        ages = [replay.heldout_slice(span) for span in spans]
        with _candidate(session, live.drafter, share) as candidate:
            mine = score_spans(candidate, spans, self._steps)
        theirs = self._live_scores.of(live, spans, self._steps)
        verdict = judge(
            gate_scores(mine, spans, ages),
            gate_scores(theirs, spans, ages),
            self._gate_tokens,
            least_gain,
        )
        log.info(
            "candidate judged",
            share=share,
            length=round(verdict.candidate_length, 3),
            live=round(verdict.live_length, 3),
            gain_at_least=round(verdict.gain_lower, 4),
            heldout_tokens=verdict.tokens,
            result=verdict.reason,
            slices={s.name: round(s.gain, 3) for s in verdict.slices},
        )
        return verdict, conditional_rates(mine)

    def _facts(
        self,
        session: TrainingSession,
        parent: int,
        verdict: Judgement,
        rates: tuple[float, ...],
        share: float,
    ) -> DraftManifest:
        parents = self.store.manifest(parent)
        return DraftManifest(
            version=max([self.last_version, *self.store.versions()]) + 1,
            parent=parent,
            method=self._method,
            sha256="",
            target_id=parents.target_id,
            target_version=self.target_version,
            origin="learned",
            tokens_seen=session.tokens_seen,
            updates=session.trainer.updates,
            heldout_tokens=verdict.tokens,
            heldout_length=verdict.candidate_length,
            heldout_rates=rates,
            parent_length=verdict.live_length,
            gain_lower=verdict.gain_lower,
            trained_share=share,
        )

    def _publish(self, exported: Exported, facts: DraftManifest) -> DraftManifest | None:
        try:
            manifest = self.store.publish(*exported, facts)
        except WeightError as error:
            log.error("a version could not be written", reason=str(error))
            return None
        self.last_version = manifest.version
        for old in self.store.versions()[:-KEPT_VERSIONS]:
            if old != manifest.parent:
                self.store.remove(old)
        return manifest

    def _dtype_of(self, version: int) -> torch.dtype:
        """Weights are published in the dtype of the version they follow."""
        with safe_open(self.store.folder(version) / WEIGHTS, "pt") as file:
            stored = [file.get_slice(name).get_dtype() for name in file.keys()]  # noqa: SIM118
        return next(DTYPES[name] for name in stored if name in DTYPES)


@contextmanager
def _candidate(session: TrainingSession, live: Drafter, share: float) -> Iterator[Drafter]:
    with session.candidate() as candidate:
        if share == 1.0:
            yield candidate
        else:
            with blended(candidate, live, share):
                yield candidate
