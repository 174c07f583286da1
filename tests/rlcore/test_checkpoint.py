"""A checkpoint is whole or it is the one before."""

from __future__ import annotations

import pytest
import torch
from safetensors import SafetensorError

from rlcore import checkpoint
from rlcore.checkpoint import CheckpointError, load_checkpoint, save_checkpoint


def test_what_was_saved_comes_back_and_a_later_one_replaces_it(tmp_path):
    folder = tmp_path / "checkpoint"
    assert load_checkpoint(folder) is None
    for step in (1, 2):
        save_checkpoint(folder, {"w": torch.full((3,), float(step))}, {"step": step})
        tensors, facts = load_checkpoint(folder)
        assert tensors["w"].tolist() == [step] * 3
        assert facts == {"step": step}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("failure", [SafetensorError("no space left"), OSError(28, "no space")])
def test_a_disk_that_is_full_is_an_os_error_and_the_one_before_stays(
    tmp_path, monkeypatch, failure
):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, {"w": torch.ones(1)}, {"step": 1})

    def full(*_):
        raise failure

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(folder, {"w": torch.zeros(1)}, {"step": 2})
    assert load_checkpoint(folder)[1] == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, {"w": torch.ones(1)}, {"step": 1})
    folder.rename(tmp_path / ".checkpoint.old")
    assert load_checkpoint(folder)[1] == {"step": 1}


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.FACTS])
def test_a_cut_off_file_is_an_error(tmp_path, name):
    folder = tmp_path / "checkpoint"
    save_checkpoint(folder, {"w": torch.ones(64)}, {"step": 1})
    path = folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError):
        load_checkpoint(folder)
