"""A resumed run's files hold every update once, whatever a kill left in them."""

from __future__ import annotations

import errno
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from rlcore.rl.sinks import METRICS, SAMPLES, TRAINED, Sinks, keep_until


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(
    updates=st.lists(st.integers(0, 9), max_size=12).map(sorted),
    until=st.integers(-1, 10),
    torn=st.integers(0, 30),
)
def test_lines_after_the_update_and_a_torn_last_line_are_gone(
    tmp_path_factory, updates, until, torn
):
    path = tmp_path_factory.mktemp("sinks") / METRICS
    whole = "".join(json.dumps({"update": u, "reward": i}) + "\n" for i, u in enumerate(updates))
    last = json.dumps({"update": 0, "reward": -1.25})
    path.write_text(whole + last[: min(torn, len(last) - 1)])
    keep_until(path, until)
    kept = [{"update": u, "reward": i} for i, u in enumerate(updates) if u <= until]
    assert read(path) == kept
    assert list(path.parent.iterdir()) == [path]


def test_a_line_that_is_no_record_is_gone(tmp_path):
    path = tmp_path / METRICS
    path.write_text('3\nnull\n[]\n{"reward": 1}\n{"update": 1}\n')
    keep_until(path, 5)
    assert read(path) == [{"update": 1}]


def test_a_resumed_run_writes_on_behind_its_checkpoint_and_a_new_one_begins_empty(tmp_path):
    first = Sinks(tmp_path, None)
    for update in (1, 2, 3):
        first.metrics(update, {"reward": update / 10, "entropy": math.nan})
        first.trained(update, {str(update): "task"})
        first.samples(update, [{"text": "a"}, {"text": "b"}])
    first.close()
    resumed = Sinks(tmp_path, 2)
    resumed.metrics(3, {"reward": 0.5})
    resumed.close()
    assert read(tmp_path / METRICS) == [
        {"update": 1, "reward": 0.1},
        {"update": 2, "reward": 0.2},
        {"update": 3, "reward": 0.5},
    ]
    assert [line["update"] for line in read(tmp_path / TRAINED)] == [1, 2]
    assert [line["update"] for line in read(tmp_path / SAMPLES)] == [1, 1, 2, 2]
    Sinks(tmp_path, None).close()
    assert read(tmp_path / METRICS) == read(tmp_path / TRAINED) == read(tmp_path / SAMPLES) == []


class FullDisk:
    """A TensorBoard writer that can write nothing any more; once so, it says it at every call."""

    def __init__(self, folder: str, purge_step: int | None) -> None:
        pass

    def add_scalar(self, name: str, value: float, update: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_tensorboard_that_cannot_be_written_costs_neither_the_run_nor_the_other_files(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", FullDisk)
    sinks = Sinks(tmp_path, None)
    sinks.metrics(1, {"reward": 0.1})
    sinks.metrics(2, {"reward": 0.2})
    sinks.close()
    assert [line["update"] for line in read(tmp_path / METRICS)] == [1, 2]
