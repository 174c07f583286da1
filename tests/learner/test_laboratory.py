"""The laboratory compares like with like: same traffic, same judgement, nothing run twice."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner import laboratory
from learner.batch import Span
from learner.lab_data import HELDOUT_SHARE, batches, is_heldout, read_traffic
from learner.lab_table import Result, markdown
from learner.recording import Recorder
from rlcore.records.wire import encode
from rlcore.target import model_identity
from tests.learner.tiny import HIDDEN, make_span, make_target, make_trace

AUX = 3 * HIDDEN

torch.set_num_threads(1)


def trace_message(span: Span, prompt: int) -> list[bytes]:
    prompt_hash = hashlib.blake2b(str(prompt).encode(), digest_size=16).hexdigest()
    trace, frames = make_trace(span, prompt_hash=prompt_hash)
    return [encode(trace), *frames]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Path, Path]:
    """(target folder, recording of 60 requests with 40 prompts)."""
    folder = tmp_path_factory.mktemp("laboratory") / "target"
    model = make_target(folder)
    path = folder.parent / "traffic.traces"
    recorder = Recorder(path, model_identity(folder), "eagle3")
    for i in range(60):
        recorder.add(trace_message(make_span(model, 20 + i % 7, 4, seed=i), prompt=i % 40))
    recorder.close()
    return folder, path


def run(world, table: Path, *more: str) -> int:
    folder, path = world
    return laboratory.main(
        ["--target", str(folder), "--replay", str(path), "--table", str(table),
         "--heldout-tokens", "100", "--tokens", "60", "120", *more]
    )  # fmt: skip


def entries(table: Path) -> list[dict]:
    found = json.loads(table.read_text())["results"]
    for entry in found:
        entry.pop("positions_per_second")
    return found


def test_no_held_out_prompt_is_ever_trained_on_and_the_limits_hold(world):
    folder, path = world
    traffic = read_traffic([path], model_identity(folder), "eagle3", AUX, 300, 100)
    trained = {span.prompt_hash for span in traffic.training}
    held = {span.prompt_hash for span in traffic.heldout}
    assert trained
    assert held
    assert not trained & held
    assert 300 <= traffic.training_tokens < 300 + 26
    assert 100 <= traffic.heldout_tokens < 100 + 26


def test_recordings_give_equal_parts(world, tmp_path):
    folder, path = world
    copy = tmp_path / "other.traces"
    copy.write_bytes(path.read_bytes())
    both = read_traffic([path, copy], model_identity(folder), "eagle3", AUX, 200, 60)
    one = read_traffic([path], model_identity(folder), "eagle3", AUX, 100, 30)
    ids = [span.request_id for span in one.training]
    assert [span.request_id for span in both.training] == ids * 2


@given(st.binary(min_size=16, max_size=16))
def test_the_split_is_a_function_of_the_prompt_hash(digest):
    share = int.from_bytes(digest[:4], "big") / 2**32
    assert is_heldout(digest.hex()) == (share < HELDOUT_SHARE)


@settings(max_examples=20, deadline=None)
@given(st.integers(30, 200), st.integers(0, 100))
def test_every_span_is_trained_once_before_any_is_trained_twice(world, size, seed):
    folder, path = world
    spans = read_traffic([path], model_identity(folder), "eagle3", AUX, 300, 100).training
    stream = batches(spans, size, seed)
    seen: list[str] = []
    while len(seen) < len(spans):
        update = next(stream)
        assert len(update) == 1 or sum(span.anchors for span in update) <= size
        seen += [span.request_id for span in update]
    assert sorted(seen) == sorted(span.request_id for span in spans)


def test_a_run_gives_the_same_figures_again_and_what_is_finished_is_not_run_again(
    world, tmp_path, monkeypatch
):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    only = ("--only", "kl", "kl-path")
    assert run(world, first, *only, "--markdown", str(tmp_path / "a.md")) == 0
    assert run(world, second, *only) == 0
    assert entries(first) == entries(second)
    assert [(e["variant"], e["tokens"]) for e in entries(first)] == [
        ("kl", 60), ("kl", 120), ("kl-path", 60), ("kl-path", 120),
    ]  # fmt: skip
    assert (tmp_path / "a.md").read_text().count("\n| kl") == 2

    ran = []
    monkeypatch.setattr(laboratory, "run_variant", lambda name, seed, *_: ran.append((name, seed)))
    assert run(world, first, "--only", "kl", "kl-path", "tv") == 0
    assert ran == [("tv", 0)]


def test_a_run_cut_off_between_two_judgements_ends_as_if_it_had_not_been(world, tmp_path):
    whole, cut = tmp_path / "whole.json", tmp_path / "cut.json"
    assert run(world, whole, "--only", "kl") == 0
    content = json.loads(whole.read_text())
    content["results"] = content["results"][:1]
    cut.write_text(json.dumps(content))
    assert run(world, cut, "--only", "kl") == 0
    last = [e["length"] for e in entries(cut)]
    assert last == [e["length"] for e in entries(whole)]


def test_nothing_new_is_started_when_the_time_is_over(world, tmp_path):
    assert run(world, tmp_path / "t.json", "--only", "kl", "--minutes", "0") == 0
    assert not (tmp_path / "t.json").exists()


def test_results_on_other_traffic_are_not_mixed_in(world, tmp_path, capsys):
    table = tmp_path / "t.json"
    assert run(world, table, "--only", "kl") == 0
    before = table.read_text()
    assert run(world, table, "--only", "tv", "--tokens", "400") == 2
    assert "other traffic" in capsys.readouterr().err
    assert table.read_text() == before


def test_an_unknown_variant_and_another_models_recording_are_one_line(world, tmp_path, capsys):
    assert run(world, tmp_path / "t.json", "--only", "nonsense") == 2
    assert capsys.readouterr().err.startswith("no variant named nonsense")
    other = tmp_path / "other.traces"
    Recorder(other, "another-model", "eagle3").close()
    assert run((world[0], other), tmp_path / "t.json", "--only", "kl") == 2
    assert "another-model" in capsys.readouterr().err


def result(variant: str, seed: int, tokens: int, length: float) -> Result:
    return Result(variant, seed, tokens, tokens, 1, length, 0.01, length, [0.5], 1.0, 100.0)


def test_the_table_ranks_by_the_longest_run_and_gives_the_spread_over_seeds():
    text = markdown(
        [result("a", 0, 10, 1.9), result("a", 0, 20, 1.5), result("a", 1, 20, 1.7),
         result("b", 0, 10, 1.1), result("b", 0, 20, 1.8), result("c", 0, 10, 3.0)],
        {"a": "first"},
    ).splitlines()  # fmt: skip
    assert [line.split("|")[1].strip() for line in text[2:]] == ["b", "a", "c"]
    assert "| a | first | 1.900 | 1.600 ± 0.141 |" in text[3]
