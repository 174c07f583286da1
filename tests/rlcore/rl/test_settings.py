"""Settings of rl-train: presets and files load, and what is wrong is named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import UsageError
from rlcore.rl.command import main
from rlcore.rl.engine import server_flags
from rlcore.rl.run_file import presets, with_file
from rlcore.rl.settings import RLTrainSettings
from rlcore.settings import load

OUT = ["--out", "runs/x"]


def loaded(*argv: str) -> RLTrainSettings:
    return load(RLTrainSettings, with_file(list(argv)), "rl-train")


def a_file(folder: Path, text: str = "") -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def wrong(*argv: str) -> str:
    with pytest.raises(UsageError) as error:
        loaded(*argv)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_every_preset_loads_and_a_flag_wins_over_it():
    assert {"quickstart", "still-1.5b"} <= set(presets())
    for name in presets():
        settings = loaded(name, "--updates", "3", "--engine.dtype", "float16")
        assert (settings.updates, settings.engine.dtype) == (3, "float16")
        assert settings.chosen_recipe().name == settings.algorithm
        assert settings.out.is_absolute()


def test_the_published_recipe_of_still_is_what_the_preset_says():
    settings = loaded("still-1.5b")
    assert settings.chosen_recipe().kl_coefficient == 1e-3
    assert settings.environment.options["wrong"] == -1.0
    assert (settings.groups_per_update, settings.group_size) == (128, 8)


def test_parts_of_a_recipe_can_be_changed_in_a_file_and_by_a_flag(tmp_path):
    path = a_file(tmp_path, 'algorithm = "grpo"\n[recipe]\nkl_coefficient = 0\nclip_high = 0.3\n')
    recipe = loaded(path, *OUT).chosen_recipe()
    assert (recipe.name, recipe.kl_coefficient, recipe.clip_high) == ("grpo", 0, 0.3)
    assert not recipe.needs_reference
    recipe = loaded(path, *OUT, "--recipe", '{"clip_high": 0.5}').chosen_recipe()
    assert recipe.clip_high == 0.5


def test_unknown_parts_and_bad_values_of_a_recipe_are_named(tmp_path):
    line = wrong(a_file(tmp_path, "[recipe]\nclip_hihg = 0.3\n"), *OUT)
    assert "clip_hihg" in line
    assert "clip_high" in line
    line = wrong(a_file(tmp_path, "[recipe]\nclip_high = -1\n"), *OUT)
    assert "clip_high" in line
    line = wrong(a_file(tmp_path, '[recipe]\nname = "mine"\n'), *OUT)
    assert "name" in line
    line = wrong(a_file(tmp_path), *OUT, "--algorithm", "grpoo")
    assert "grpoo" in line
    assert "dapo" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--updates", "0"], "--updates"),
        (["--group-size", "1"], "--group-size"),
        (["--max-off-policy-steps", "-1"], "--max-off-policy-steps"),
        (["--optimiser.lr", "0"], "--optimiser.lr"),
        (["--optimiser.precision", "fp8"], "--optimiser.precision"),
        (["--sampling.top-p", "0.9"], "--sampling.top-p"),
        (["--sampling.temperature", "0"], "--sampling.temperature"),
        (["--engine.speculative-tokens", "many"], "--engine.speculative-tokens"),
        (["--environment.workers", "0"], "--environment.workers"),
        (["--evaluate-samples", "4"], "evaluate-temperature"),
        (["--concurrency", "4"], "concurrency"),
        (["--optimiser.updates-per-batch", "3"], "max-off-policy-steps"),
        (["--engine.max-model-len", "100"], "max-model-len"),
        (["--sampling.temperature", "0.5", "--sampling.adapt-temperature"], "--sampling"),
        (["--engine.where", "process", "--engine.url", "http://127.0.0.1:1"], "where"),
        (["--engine.where", "process", "--engine.learn-drafts"], "learn-drafts"),
        (["--engine.serve-flags", '["--cores=1"]'], "engine.threads"),
        (["--no-such-flag", "1"], "no-such-flag"),
    ],
)
def test_a_bad_value_gives_one_line_that_names_the_flag(tmp_path, flags, named):
    assert named in wrong(a_file(tmp_path), *OUT, *flags)


def test_an_engine_in_the_process_has_a_drafter_that_is_frozen(tmp_path):
    settings = loaded(a_file(tmp_path), *OUT, "--engine.where", "process")
    assert not settings.engine.learns_drafts
    assert loaded(a_file(tmp_path), *OUT).engine.learns_drafts
    flags = server_flags(settings, tmp_path, tmp_path)
    assert flags[flags.index("--learner") + 1] == "off"


def test_without_a_folder_for_the_run_nothing_starts(tmp_path):
    assert "--out" in wrong(a_file(tmp_path))


def test_a_file_that_is_no_toml_is_named(tmp_path):
    path = a_file(tmp_path, "updates = = 3\n")
    line = wrong(path, *OUT)
    assert path in line
    assert "line 1" in line


def test_an_unknown_key_of_a_file_is_named(tmp_path):
    assert "updatse" in wrong(a_file(tmp_path, "updatse = 3\n"), *OUT)
    assert "lrr" in wrong(a_file(tmp_path, "[optimiser]\nlrr = 3\n"), *OUT)


@pytest.mark.parametrize("key", ["dtype = 'bfloat16'", "max_model_len = 64", "threads = 4"])
def test_a_key_of_another_command_is_not_passed_over(tmp_path, key):
    assert key.split()[0].replace("_", "-") in wrong(a_file(tmp_path, key + "\n"), *OUT)


@pytest.mark.parametrize("argv", [[], ["--updates", "3"], ["nowhere.toml"], ["quick"]])
def test_a_missing_preset_or_file_is_said_with_the_presets_there_are(argv):
    assert "quickstart" in wrong(*argv)


def test_a_dry_run_starts_nothing_and_shows_a_task(tmp_path, capsys):
    pytest.importorskip("reasoning_gym")
    out = tmp_path / "out"
    assert main(["quickstart", "--out", str(out), "--dry-run", "--home", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "8 groups x 12 = 96 rollouts" in shown
    assert "reasoning_gym:chain_sum/train/0" in shown
    assert not out.exists()
