"""Recordings are learned from as live: what wins goes live at once, and counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.recording import Recorder, Recording, RecordingError
from learner.rehearsal import rehearse
from learner.target import Target
from rlcore.home import Home
from rlcore.records.wire import encode
from rlcore.settings import ReplaySettings
from tests.learner.tiny import make_span, make_target, make_trace

torch.set_num_threads(1)


@torch.no_grad()
def recorded(model, path: Path, aux_count: int = 3) -> Recording:
    """Requests that the target answered greedily: something can be learned from them."""
    recorder = Recorder(path, "tiny", "eagle3")
    for seed in range(80):
        tokens = make_span(model, 40, 4, seed=seed).token_ids[None, :4]
        for _ in range(37):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
        output = model.model(tokens[:, :40], output_hidden_states=True)
        states, last = output.hidden_states, output.last_hidden_state[0]
        span = replace(
            make_span(model, 40, 4, seed=seed),
            token_ids=tokens[0],
            aux=torch.cat([states[i][0] for i in (2, 4, 5, 6)[:aux_count]], dim=-1),
            last=last,
            lse=torch.logsumexp(model.lm_head(last), dim=-1),
            prompt_hash=("0" if seed % 3 == 0 else "f") + f"{seed:031x}",
        )
        trace, frames = make_trace(span)
        recorder.add([encode(trace), *frames])
    recorder.close()
    return Recording(path)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    model = make_target(folder)
    return model, Target.open(folder)


def settings(path: Path, out: Path) -> ReplaySettings:
    return ReplaySettings(replay=[path], out=out, gate_tokens=100, draft_vocab=256)


def test_what_wins_goes_live_at_once_and_counts_as_promoted(world, tmp_path):
    model, target = world
    recording = recorded(model, tmp_path / "a")
    wanted = settings(tmp_path / "a", tmp_path / "out")
    facts = rehearse(wanted, [recording], target, "tiny", Home(tmp_path))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert facts["rejected"] == {}
    assert facts["promoted"] == manifest["version"] >= 1
    assert manifest["parent"] == manifest["version"] - 1


def test_a_recording_for_another_number_of_layers_is_refused_before_training(world, tmp_path):
    model, target = world
    recording = recorded(model, tmp_path / "a", aux_count=4)
    with pytest.raises(RecordingError, match="128 wide, the drafter reads 96"):
        rehearse(
            settings(tmp_path / "a", tmp_path / "out"), [recording], target, "tiny", Home(tmp_path)
        )
    assert not (tmp_path / "out").exists()
