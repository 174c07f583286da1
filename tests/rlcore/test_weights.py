"""A version is whole or not there, and no damaged or foreign weights get past the checks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from rlcore import weights
from rlcore.records.versions import DraftManifest
from rlcore.weights import (
    CONFIG,
    FILES,
    MANIFEST,
    WEIGHTS,
    WeightError,
    WeightStore,
    check_finite,
    check_signature,
    read_checked,
    signature,
)

TENSORS = {
    "fc.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    "d2t": torch.arange(5),
}


def manifest(version: int = 1) -> DraftManifest:
    return DraftManifest(version, 0, "eagle3", "", "target", 0, "learned")


@pytest.fixture
def store(tmp_path) -> WeightStore:
    return WeightStore(tmp_path / "drafts")


@pytest.fixture
def sent(tmp_path) -> dict[str, bytes]:
    """The files of a version, as another store would send them."""
    other = WeightStore(tmp_path / "other")
    other.publish(TENSORS, {"a": 1}, manifest())
    return other.files(1)


def refused(reason: str):
    return pytest.raises(WeightError, match=f"^{reason}: ")


def written(folder: Path, content: bytes) -> tuple[Path, str]:
    path = folder / WEIGHTS
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


# --- publishing --------------------------------------------------------------------------------


def test_a_published_version_reads_back_as_it_was(store):
    made = store.publish(TENSORS, {"a": 1}, manifest())
    assert store.versions() == [1]
    assert store.manifest(1) == made
    assert made.created > 0
    names, tensors = read_checked(store.folder(1) / WEIGHTS, made.sha256)
    assert set(names) == set(TENSORS)
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert json.loads((store.folder(1) / CONFIG).read_text()) == {"a": 1}


def test_versions_are_listed_in_the_order_of_their_numbers(store):
    for version in (10, 2, 1_000_000, 1):
        store.publish(TENSORS, {}, manifest(version))
    assert store.versions() == [1, 2, 10, 1_000_000]
    assert [m.version for m in store.manifests()] == [1, 2, 10, 1_000_000]
    store.remove(2)
    store.remove(77)
    assert store.versions() == [1, 10, 1_000_000]


def test_an_empty_or_missing_store_has_no_versions(store):
    assert store.versions() == []
    with refused("unknown_version"):
        store.manifest(1)
    with refused("unreadable"):
        store.files(1)


@pytest.mark.parametrize("crash", ["fsync", "rename"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_half_written_version_is_never_listed(store, monkeypatch, crash, calls):
    """The process dies at the ``calls``-th fsync, or at the rename; nothing is tidied up."""

    class Died(BaseException):
        pass

    left = [calls if crash == "fsync" else 1]

    def dying(*args):
        left[0] -= 1
        if left[0] == 0:
            raise Died

    monkeypatch.setattr(*((os, "fsync") if crash == "fsync" else (Path, "rename")), dying)
    with pytest.raises(Died):
        store.publish(TENSORS, {}, manifest())
    assert [p for p in store.root.iterdir() if p.is_dir()]  # it is there, half-written
    assert store.versions() == []
    monkeypatch.undo()
    store.publish(TENSORS, {}, manifest())
    assert store.versions() == [1]
    assert sorted(p.name for p in store.root.iterdir()) == ["000001"]


def test_a_failed_rewrite_keeps_the_version_that_was_there(store, monkeypatch):
    made = store.publish(TENSORS, {}, manifest())

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("unwritable"):
        store.publish({"x": torch.zeros(1)}, {}, manifest())
    assert store.manifest(1) == made
    read_checked(store.folder(1) / WEIGHTS, made.sha256)
    assert sorted(p.name for p in store.root.iterdir()) == ["000001"]


def test_a_folder_without_a_manifest_and_foreign_folders_are_not_versions(store):
    store.publish(TENSORS, {}, manifest())
    (store.root / "000002").mkdir()
    (store.root / "notes").mkdir()
    (store.root / "notes" / MANIFEST).write_text("{}")
    assert store.versions() == [1]


def test_a_damaged_manifest_is_a_weight_error(store):
    store.publish(TENSORS, {}, manifest())
    for content in (b"", b"{}", b"\xff\xfe", b'{"version": "one"}'):
        (store.folder(1) / MANIFEST).write_bytes(content)
        with refused("malformed"):
            store.manifest(1)


# --- receiving ---------------------------------------------------------------------------------


def test_a_sent_version_is_received_as_it_was(store, sent):
    received = store.receive(1, {name: memoryview(content) for name, content in sent.items()})
    assert store.manifest(1) == received
    assert store.files(1) == sent


def changed_manifest(sent: dict[str, bytes], **changes) -> bytes:
    decoded = msgspec.json.decode(sent[MANIFEST], type=DraftManifest)
    return msgspec.json.encode(msgspec.structs.replace(decoded, **changes))


def test_what_does_not_fit_is_not_received(store, sent):
    not_safetensors = b"\x00" * 100
    bad = {
        "files": [{k: v for k, v in sent.items() if k != name} for name in FILES]
        + [sent | {"../../evil": b""}],
        "version": [sent | {MANIFEST: changed_manifest(sent, version=2)}],
        "digest": [
            sent | {WEIGHTS: sent[WEIGHTS][:-1]},
            sent | {WEIGHTS: b""},
            sent | {WEIGHTS: sent[WEIGHTS][:-1] + bytes([sent[WEIGHTS][-1] ^ 1])},
            sent | {MANIFEST: changed_manifest(sent, sha256="0" * 64)},
        ],
        "malformed": [
            sent | {MANIFEST: b"no json"},
            sent | {MANIFEST: b"{}"},
            sent | {CONFIG: b"no json"},
            sent | {CONFIG: b"\xff"},
            sent | {
                WEIGHTS: not_safetensors,
                MANIFEST: changed_manifest(
                    sent, sha256=hashlib.sha256(not_safetensors).hexdigest()
                ),
            },
        ],
    }  # fmt: skip
    for reason, cases in bad.items():
        for files in cases:
            with refused(reason):
                store.receive(1, files)
    assert store.versions() == []
    assert not store.root.exists() or not list(store.root.iterdir())


# --- reading -----------------------------------------------------------------------------------


def test_a_missing_file_is_a_weight_error(tmp_path):
    with refused("unreadable"):
        read_checked(tmp_path / WEIGHTS, "0" * 64)
    with refused("unreadable"):
        read_checked(tmp_path, "0" * 64)


@given(data=st.data())
def test_any_changed_or_missing_byte_is_refused(data, tmp_path_factory):
    content = save(TENSORS)
    digest = hashlib.sha256(content).hexdigest()
    if data.draw(st.booleans()):
        damaged = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        place = data.draw(st.integers(0, len(content) - 1))
        flip = content[place] ^ data.draw(st.integers(1, 255))
        damaged = content[:place] + bytes([flip]) + content[place + 1 :]
    path, _ = written(tmp_path_factory.mktemp("w"), damaged)
    with refused("digest"):
        read_checked(path, digest)


@given(cut=st.integers(0, len(save(TENSORS)) - 1))
def test_a_truncated_file_is_refused_even_with_its_own_digest(cut, tmp_path_factory):
    path, digest = written(tmp_path_factory.mktemp("w"), save(TENSORS)[:cut])
    with pytest.raises(WeightError):
        read_checked(path, digest)


def file_of(entries: object, data: bytes, padding: int = 0) -> bytes:
    header = json.dumps(entries).encode() + b" " * padding
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize("padding", range(8))
def test_a_header_of_any_length_is_read(padding, tmp_path):
    """Tensors then begin at any byte."""
    value = torch.arange(6, dtype=torch.float32).view(2, 3)
    entries = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "none": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [24, 24]},
        "one": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
    }
    data = value.numpy().tobytes() + struct.pack("<q", 5)
    _, tensors = read_checked(*written(tmp_path, file_of(entries, data, padding)))
    assert torch.equal(tensors["a"], value)
    assert tensors["none"].shape == (0, 3)
    assert tensors["one"].item() == 5


@pytest.mark.parametrize(
    "change",
    [
        {"data_offsets": [0, 25]}, {"data_offsets": [1, 25]}, {"data_offsets": [-24, 0]},
        {"data_offsets": [24, 0]}, {"data_offsets": [0, 20]}, {"shape": [2, 4]},
        {"shape": [-2, -3]}, {"dtype": "F8_E4M3"}, {"dtype": "BF16"}, {"shape": [2**40, 2**40]},
    ],
)  # fmt: skip
def test_an_entry_that_does_not_fit_its_bytes_is_refused(change, tmp_path):
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | change
    with refused("malformed"):
        read_checked(*written(tmp_path, file_of({"a": entry}, bytes(24))))


def test_an_oversized_file_is_refused_unread(tmp_path, monkeypatch):
    path, digest = written(tmp_path, save(TENSORS))
    monkeypatch.setattr(weights, "MAX_WEIGHT_BYTES", 10)
    with refused("oversized"):
        read_checked(path, digest)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_and_infinity_are_refused(value, dtype, tmp_path):
    tensor = torch.ones(4, 7, dtype=dtype)
    tensor[2, 3] = value
    path, digest = written(tmp_path, save({"a": torch.ones(2), "b": tensor}))
    with refused("not_finite"):
        read_checked(path, digest)


def test_large_finite_weights_are_not_mistaken_for_infinity():
    check_finite({"a": torch.full((1000,), 3e4, dtype=torch.float16), "b": torch.arange(3)})
    check_finite({"a": torch.full((100,), 1e38)})


# --- signatures --------------------------------------------------------------------------------


def test_a_signature_is_what_was_saved():
    assert signature(save(TENSORS, metadata={"format": "pt"})) == {
        "fc.weight": ("F32", (3, 4)),
        "norm.weight": ("BF16", (4,)),
        "d2t": ("I64", (5,)),
    }


@pytest.mark.parametrize("length", [2**20, 2**40, 2**63, 2**64 - 1])
def test_an_announced_header_length_allocates_nothing(length):
    content = struct.pack("<Q", length) + b"{}" * 20
    tracemalloc.start()
    with refused("truncated"):
        signature(content)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@given(st.binary(max_size=300))
def test_garbage_has_no_signature_and_raises_nothing_else(content):
    try:
        signature(struct.pack("<Q", max(0, len(content) - 8)) + content)
        signature(content)
    except WeightError:
        pass


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.one_of(
        json_values,
        st.dictionaries(
            st.text(max_size=4),
            st.fixed_dictionaries({"dtype": json_values, "shape": json_values}),
            max_size=3,
        ),
    )
)
def test_json_that_is_no_safetensors_header_raises_nothing_else(value):
    header = json.dumps(value).encode()
    with contextlib.suppress(WeightError):
        signature(struct.pack("<Q", len(header)) + header)


def test_deeply_nested_json_is_a_weight_error():
    header = b"[" * 200_000
    with refused("malformed"):
        signature(struct.pack("<Q", len(header)) + header)


def test_only_the_same_names_shapes_and_dtypes_are_let_through():
    live = signature(save(TENSORS))
    check_signature(dict(live), live)
    without = {name: live[name] for name in live if name != "d2t"}
    for got in (
        without,
        {**live, "embed_tokens.weight": ("F32", (4, 4))},
        {**live, "fc.weight": ("F32", (4, 3))},
        {**live, "fc.weight": ("F32", (12,))},
        {**live, "fc.weight": ("BF16", (3, 4))},
        {},
    ):
        with refused("shape"):
            check_signature(got, live)


def test_published_files_are_plain_safetensors(store):
    store.publish(TENSORS, {}, manifest())
    assert load_file(store.folder(1) / WEIGHTS).keys() == TENSORS.keys()
