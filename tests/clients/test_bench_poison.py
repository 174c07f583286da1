"""The poison benchmark: who is which tenant, what is sent when, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from itertools import islice
from pathlib import Path

import pytest

from clients.bench.common import BenchError
from clients.bench.poison import POISON, main, measure, nonsense, parse, tenants, windows
from clients.load import RequestRecord
from clients.workload import Prompt
from rlcore.records.acceptance import AcceptanceCount
from server.access import TENANT_NAME
from tests.clients.stub import Stub, running


def write(path: Path, *texts: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps({"id": f"{path}-{i}", "turns": [text]}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def test_no_two_tenants_have_one_name_and_none_has_the_attackers() -> None:
    files = ["a/chat.jsonl", "b/chat.jsonl", "poison.jsonl", "c/poison.jsonl", "maths & co.jsonl"]
    files += ["x" * 80 + "1.jsonl", "x" * 80 + "2.jsonl"]
    names = [spec.name for spec in tenants([Path(f) for f in files])]
    assert names[:5] == ["chat", "chat-2", "poison-2", "poison-3", "maths---co"]
    assert len({POISON, *names}) == len(files) + 1
    assert all(TENANT_NAME.fullmatch(name.encode()) for name in names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--before", "0"], "--before must be above 0"),
        (["--after", "inf"], "--after must be above 0"),
        (["--poll", "-1"], "--poll must be above 0"),
        (["--max-tokens", "0"], "--max-tokens must be above 0"),
        (["--home", "."], "not empty"),
        (["--home", "there.jsonl"], "is no folder"),
        (["--json", "none/x.json"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "there.jsonl", "one")
    with pytest.raises(SystemExit):
        parse(["--workload", "there.jsonl", *words])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_tenants_with_nothing_but_each_others_prompts_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", "the same") for name in "ab"]
    with pytest.raises(BenchError, match=r"phase b .* 0 are left"):
        main(["--workload", *map(str, files)])


def test_nonsense_never_repeats_and_is_the_same_for_a_seed() -> None:
    prompts = list(islice(nonsense(1), 200))
    assert len({p.key for p in prompts}) == len({p.id for p in prompts}) == 200
    assert list(islice(nonsense(1), 200)) == prompts


def test_only_the_middle_window_is_poisoned_and_honest_tenants_send_in_all() -> None:
    files = [Path("a/chat.jsonl"), Path("b/chat.jsonl")]
    options = ["--before", "0.03", "--during", "0.03", "--after", "0.03", "--top-p", "0.9"]
    args = parse(["--workload", *map(str, files), *options])
    traffic = {
        spec.name: [Prompt(f"{spec.name}-{i}", (f"fine {spec.name} {i}",)) for i in range(1000)]
        for spec in tenants(files)
    }
    with running(Stub()) as stub:
        results, polls = asyncio.run(measure(args, stub.url.removesuffix("/v1"), traffic))
    assert {h["x-paceline-tenant"] for h in stub.headers} == {"chat", "chat-2", POISON}
    assert {body["top_p"] for body in stub.bodies} == {0.9}
    assert {result.ended_by for result in results.values()} == {"time"}
    assert all(1.8 <= r.started < 3.6 for r in results[POISON].records)
    for name in traffic:
        assert all(w["requests"] for w in windows(results[name].records, [1.8, 3.6, 5.4]).values())
    assert polls


def test_a_request_counts_in_the_window_in_which_it_began() -> None:
    def record(started: float, emitted: int, error: str | None = None) -> RequestRecord:
        count = AcceptanceCount(1, steps=10, emitted=emitted)
        return RequestRecord(prompt_id="p", started=started, versions=[count], error=error)

    records = [
        record(0, 20),
        record(9.9, 30),
        record(10, 15),
        record(20, 99, "gone"),
        record(31, 9),
    ]
    found = windows(records, [10.0, 20.0, 30.0])
    assert [found[w]["requests"] for w in ("before", "during", "after")] == [2, 1, 0]
    assert found["before"]["acceptance_length"] == 2.5
    assert found["after"]["acceptance_length"] is None


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert re.search(r"--during MINUTES\s+default: 6", capsys.readouterr().out)
