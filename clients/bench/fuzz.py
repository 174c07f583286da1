"""Fuzz a server's whole OpenAPI with schemathesis: every route, vLLM's and ours, valid and broken input.

A 5xx of ours, a request without an answer, one that takes longer than --deadline, and a request that is
served without the key are failures; a 5xx of vLLM's own is listed with its case. Without --url it starts
a server of its own, with a key: three requests in four carry it, the others none or a wrong one.

What is changed before a request is sent, so that many of them come past the first check and none takes
minutes on a CPU: the model's name is put into three bodies of four, two of four keep only a few of their
optional fields, one of four gets a plain prompt; some requests get our headers; how many answers are asked
for (n, best_of and the like) is lowered to at most --most. max_tokens is sent as it was drawn: the server
itself is told to end answers after --most tokens (max_new_tokens).

The JSON holds, beside the machine and the options:
  cases, problems   how many in all, and by what was wrong
  routes            of each route: cases, answers by status, its slowest case, the commonest refusals
  failures          each kind with its count and up to three cases in full
  slowest           the ten slowest cases
  memory            of the server's process tree, before and after, in bytes
  restarts          routes whose requests ended the engine; the server was started anew
  capped            how often which field was lowered
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from clients.bench import common
from clients.bench.fuzz_cases import Tally, Target, operations_of, with_bodies
from clients.bench.processes import engine_of, tree_memory
from clients.process import ServerProcess

FATAL = ("ours", "hang", "dropped", "key", "unavailable")
"""Problems that fail the run; upstream's are only listed."""

OPEN = ("/health", "/ready", "/dashboard")
"""Paths that need no key: probes, and a page without figures."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m clients.bench.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after a lone -- go to `paceline serve` as they are.",
    )
    add = parser.add_argument
    add("--url", help="fuzz this server instead of an own one, such as http://127.0.0.1:8000")
    add("--api-key", help="of the server at --url, if it asks for one")
    add("--log", type=Path, help="of the server at --url: tells whose fault a 5xx is")
    add("--target", default="embedded", help="of the own server (default: embedded)")
    add("--examples", type=int, default=200, help="drawn of each route and kind (default: 200)")
    add("--minutes", type=float, default=18.0, help="end after so long (default: 18)")
    add("--deadline", type=float, default=60.0, metavar="S", help="of a request (default: 60)")
    add("--most", type=int, default=8, help="tokens and answers of a request (default: 8)")
    add("--seed", type=int, default=0, help="default: 0")
    add("--only", nargs="+", default=[], metavar="TEXT", help="routes that contain one of these")
    add("--without", nargs="+", default=[], metavar="TEXT", help="routes left out")
    add("--start-deadline", type=float, default=900.0, metavar="S", help="default: 900")
    add("--json", type=Path, metavar="FILE", help="write everything here")
    args = common.parse(parser, argv)
    if find_spec("schemathesis") is None:
        parser.error("this needs schemathesis; pip install -e '.[dev]'")
    for name in ("examples", "minutes", "deadline", "most"):
        if vars(args)[name] <= 0:
            parser.error(f"--{name} must be above 0")
    return args


def own_server(args: argparse.Namespace, key: str) -> ServerProcess:
    """Its answers end after --most tokens, whatever is asked."""
    words = list(args.serve_flags)
    split = words.index("--") if "--" in words else len(words)
    flags = [
        "--target", args.target, "--learner", "off", "--api-key", key, "--max-model-len", "512",
        "--kv-cache-gib", "0.5", *words[:split], "--",
        "--override-generation-config", f'{{"max_new_tokens": {args.most}}}',
        "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *words[split + 1 :],
    ]  # fmt: skip
    home = Path(tempfile.mkdtemp(prefix="paceline-fuzz-")) / "home"
    return ServerProcess(home, flags, api_key=key, start_deadline_s=args.start_deadline)


def target_of(args: argparse.Namespace, server: ServerProcess | None, key: str | None) -> Target:
    """Raises BenchError when the server does not tell its OpenAPI or its model."""
    url = args.url.rstrip("/") if server is None else server.url
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            api = client.get("/openapi.json").raise_for_status().json()
            models = client.get("/v1/models").raise_for_status().json()
    except httpx.HTTPError as error:
        raise common.BenchError(f"{url} does not answer as it should: {error}") from None
    log = args.log if server is None else server.log
    model = models["data"][0]["id"]
    return Target(url=url, key=key, model=model, api=with_bodies(api), log=log)


def fuzz(args: argparse.Namespace) -> dict[str, Any]:
    from clients.bench.fuzz_drive import Driver  # schemathesis is there: parse has looked

    facts = common.machine_facts()
    key = args.api_key if args.url else secrets.token_urlsafe(24)
    tally = Tally()
    restarts: list[str] = []
    end = time.monotonic() + args.minutes * 60
    with ExitStack() as stack:
        server = None if args.url else stack.enter_context(own_server(args, key))
        target = target_of(args, server, key)
        memory = [tree_memory(server.pid)] if server else []
        engine = engine_of(server) if server else set()
        driver = Driver(target, args, tally, OPEN)
        names = operations_of(target.api, args.only, args.without)
        unreached = []
        for i, name in enumerate(names):
            left = end - time.monotonic()
            if left <= 0:
                unreached.append(name)
                continue
            driver.run(name, left / (len(names) - i))
            common.console.print(f"{name}: {dict(tally.statuses.get(name, ()))}")
            if server is not None and engine_of(server) != engine:
                restarts.append(name)
                common.console.print(f"the engine has ended; the log:\n{server.tail()}")
                server.stop()
                server.start()
                engine = engine_of(server)
        if server is not None:
            memory.append(tree_memory(server.pid))
    return {
        "benchmark": "fuzz",
        "machine": facts,
        "options": {**vars(args), "api_key": bool(key)},
        "cases": tally.cases,
        "problems": dict(tally.problems()),
        "routes": tally.routes(),
        "not_reached": unreached,
        "failures": tally.failures(),
        "slowest": tally.slowest,
        "memory": memory,
        "restarts": restarts,
        "keys": dict(tally.keys),
        "capped": dict(tally.capped),
        "not_sent": driver.not_sent,
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    report = fuzz(args)
    common.write_json(args.json, report)
    common.print_table(
        f"{report['cases']} cases",
        ("route", "cases", "statuses", "slowest s"),
        [
            (
                name,
                r["cases"],
                " ".join(f"{s}:{n}" for s, n in r["statuses"].items()),
                r["slowest_s"],
            )
            for name, r in report["routes"].items()
        ],
    )
    for failure in report["failures"]:
        common.console.print(
            f"{failure['problem']} ({failure['count']}): {failure['route']} {failure['status']}, "
            f"{failure['where']}"
        )
    common.console.print(f"problems: {report['problems']}; restarts: {report['restarts']}")
    bad = sum(report["problems"].get(name, 0) for name in FATAL)
    return 1 if bad or report["restarts"] else 0


if __name__ == "__main__":
    common.run_main(main)
