"""Which file a run is told by."""

from __future__ import annotations

import pytest

from rlcore.errors import UsageError
from rlcore.rl.command import main
from rlcore.rl.run_file import presets, with_file
from rlcore.rl.settings import RLTrainSettings
from rlcore.settings import load


def test_a_preset_a_file_and_flags_are_told_apart(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("updates = 3\nout = 'x'\n")
    assert with_file([str(file), "--seed", "1"]) == ["--config", str(file), "--seed", "1"]
    assert with_file(["quickstart"])[1].endswith("quickstart.toml")
    for wrong in ([], ["--seed", "1"], ["nothing-like-this"]):
        with pytest.raises(UsageError, match="quickstart"):
            with_file(wrong)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_is_a_valid_run(preset):
    settings = load(RLTrainSettings, with_file([preset]), "rl-train")
    assert settings.chosen_recipe().name == settings.algorithm


def test_flags_win_over_the_file():
    settings = load(RLTrainSettings, with_file(["quickstart", "--updates", "7"]), "rl-train")
    assert settings.updates == 7


def test_a_dry_run_says_what_would_be_done_and_starts_nothing(capsys, tmp_path):
    assert main(["quickstart", "--dry-run", "--out", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "reasoning_gym:chain_sum/train/0" in told
    assert "nothing was started" in told
    assert not (tmp_path / "run").exists()
