"""The embedded model: made once, whole or not at all, repaired when it is damaged."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from pathlib import Path

import pytest

from rlcore import models
from rlcore.home import Home
from rlcore.models import EMBEDDED_NAME, RECORD, ModelError, embedded_model, resolve_target, verify


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


class Conversion:
    """Takes the place of the real one: a second of work in none, counted, and broken on request."""

    def __init__(self) -> None:
        self.runs = 0
        self.breaks = False

    def __call__(self, source: Path, folder: Path) -> None:
        self.runs += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if self.breaks:
            raise KeyboardInterrupt
        (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> Conversion:
    fake = Conversion()
    monkeypatch.setattr(models, "_convert", fake)
    return fake


@pytest.mark.slow
def test_the_embedded_model_is_the_one_it_should_be(embedded_model: Path) -> None:
    assert verify(embedded_model) == []
    config = json.loads((embedded_model / "config.json").read_text())
    assert (config["dtype"], config["num_hidden_layers"], config["vocab_size"]) == (
        "bfloat16",
        30,
        49152,
    )
    generation = json.loads((embedded_model / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2
    assert "<|im_start|>" in (embedded_model / "chat_template.jinja").read_text()
    assert str(Path.home()) not in (embedded_model / "config.json").read_text()


@pytest.mark.slow
def test_a_truncated_model_is_made_anew_and_leftovers_go(embedded_model: Path, home: Home) -> None:
    folder = home.models / EMBEDDED_NAME
    shutil.copytree(embedded_model, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    with open(embedded_model / "model.safetensors", "rb") as whole:
        (folder / "model.safetensors").write_bytes(whole.read(1 << 20))
    leftover = home.models / f".{EMBEDDED_NAME}.4711"
    leftover.mkdir()
    (leftover / "config.json").write_text("{}")
    assert resolve_target("embedded", home) == folder
    assert verify(folder) == []
    assert json.loads((folder / RECORD).read_text()) == json.loads(
        (embedded_model / RECORD).read_text()
    )
    assert list(home.models.iterdir()) == [folder]


def test_it_is_made_once(home: Home, conversion: Conversion) -> None:
    assert embedded_model(home) == embedded_model(home)
    assert conversion.runs == 1


def test_an_interrupted_conversion_leaves_no_model(home: Home, conversion: Conversion) -> None:
    conversion.breaks = True
    with pytest.raises(KeyboardInterrupt):
        embedded_model(home)
    assert not (home.models / EMBEDDED_NAME).exists()
    conversion.breaks = False
    folder = embedded_model(home)
    assert verify(folder) == []
    assert list(home.models.iterdir()) == [folder]


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '{"model.safetensors": 7}', "null"])
def test_a_damaged_record_is_no_record(home: Home, conversion: Conversion, record: str) -> None:
    folder = embedded_model(home)
    (folder / RECORD).write_text(record)
    assert verify(folder) == [RECORD]
    assert verify(embedded_model(home)) == []
    assert conversion.runs == 2


def test_verify_names_what_is_missing_or_changed(home: Home, conversion: Conversion) -> None:
    folder = embedded_model(home)
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    (folder / "config.json").unlink()
    assert sorted(verify(folder)) == ["config.json", "model.safetensors"]


def test_two_at_once_make_it_once(home: Home, conversion: Conversion) -> None:
    with home.lock("models"):
        thread = threading.Thread(target=embedded_model, args=(home,))
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        models._make(home.models, home.models / EMBEDDED_NAME)
    thread.join(10)
    assert not thread.is_alive()
    assert conversion.runs == 1


def test_a_damaged_package_is_refused(
    home: Home, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "GGUF_SHA256", hashlib.sha256(b"another").hexdigest())
    with pytest.raises(ModelError, match="is damaged; run: pip install"):
        embedded_model(home)
    assert conversion.runs == 0


def test_a_missing_package_is_one_line(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="is missing; run: pip install"):
        embedded_model(home)


def test_folders_and_ids(home: Home, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_target(str(folder), home)
    (folder / "config.json").write_text("{}")
    assert resolve_target(str(folder), home) == folder
    assert resolve_target("org/name", home) == "org/name"


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where", "a/b/c", "~/no"])
def test_an_unknown_target_is_one_line(home: Home, name: str) -> None:
    with pytest.raises(ModelError, match=r"there is no model folder .*; give") as caught:
        resolve_target(name, home)
    assert "\n" not in str(caught.value)
