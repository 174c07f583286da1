"""A worse version goes live past the gate: how many requests until the watch goes back?

For each --noise a child of the live version is written whose matrices carry Gaussian noise of so many
times their own standard deviation. It is activated as an operator would, requests are sent one at a
time, and what is counted is those it served until the learner's watch had gone back. Noise 0 is the
control: nothing is to be found. The live version at the start has to be a trained one.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load, save

from clients.bench import common
from clients.load import LoadOptions, RequestRecord, make_client, run_load, served_model
from clients.process import ServerProcess
from clients.summary import acceptance_by_version
from clients.workload import Prompt
from rlcore.records.versions import DraftManifest


class Trial(msgspec.Struct):
    noise: float
    version: int
    requests: int
    """Begun under the version."""
    tokens: int
    seconds: float
    length: float | None
    """Acceptance length of the version, over these requests."""
    parent_length: float | None
    """Of its parent, over the requests before."""
    rolled_back: bool
    reason: str


def write_child(root: Path, parent: int, version: int, noise: float) -> None:
    """Version ``version``, a noisy ``parent``, into the folder of versions ``root``."""
    manifest = msgspec.json.decode(
        (root / f"{parent:06d}" / "manifest.json").read_bytes(), type=DraftManifest
    )
    tensors = load((root / f"{parent:06d}" / "model.safetensors").read_bytes())
    torch.manual_seed(version)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim == 2:
            wide = tensor.float()
            tensors[name] = (wide + noise * wide.std() * torch.randn_like(wide)).to(tensor.dtype)
    weights = save(tensors)
    child = msgspec.structs.replace(
        manifest, version=version, parent=parent, origin="learned", created=time.time(),
        sha256=hashlib.sha256(weights).hexdigest(),
    )  # fmt: skip
    partial = root / f".{version:06d}.bench"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(weights)
    (partial / "config.json").write_bytes((root / f"{parent:06d}" / "config.json").read_bytes())
    (partial / "manifest.json").write_bytes(msgspec.json.encode(child))
    partial.rename(root / f"{version:06d}")


def length_of(records: Sequence[RequestRecord], version: int) -> float | None:
    found = acceptance_by_version(records).get(version)
    return None if found is None else found.length


async def send(
    args: argparse.Namespace, url: str, prompts: Sequence[Prompt]
) -> list[RequestRecord]:
    async with make_client(f"{url}/v1") as client:
        options = LoadOptions(
            model=await served_model(client),
            concurrency=1,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            deadline_s=args.deadline,
        )
        result = await run_load(client, prompts, options)
    if any(record.error for record in result.records):
        raise common.BenchError(f"a request failed: {result.records[-1].error}")
    return result.records


def run_trial(
    args: argparse.Namespace, server: ServerProcess, noise: float, prompts: list[Prompt]
) -> Trial:
    """Takes its prompts off the front of ``prompts``."""
    parent = server.status()["draft"]["live"]

    def ask(count: int) -> list[RequestRecord]:
        taken, rest = common.take(prompts, count, "--requests")
        prompts[:] = rest
        return asyncio.run(send(args, server.url, taken))

    before = ask(args.before)
    version = max(draft["version"] for draft in server.drafts()) + 1
    (root,) = (server.home / "drafts").iterdir()
    write_child(root, parent, version, noise)
    answer = server.post(f"/v1/paceline/drafts/{version}/activate")
    if answer.status_code != 200:
        raise common.BenchError(f"the version was not activated: {answer.text}")
    begun = time.monotonic()
    records: list[RequestRecord] = []
    while server.status()["draft"]["live"] == version and len(records) < args.requests:
        records += ask(1)
    seconds = time.monotonic() - begun
    live = server.status()["draft"]["live"]
    if live == version:
        server.post(f"/v1/paceline/drafts/{parent}/activate")
    elif live != parent:
        raise common.BenchError(f"version {live} went live, and not by a rollback")
    changes = server.get("/v1/paceline/history").json()["changes"]
    reasons = [c["reason"] for c in changes if c["cause"] == "rolled_back"]
    return Trial(
        noise=noise,
        version=version,
        requests=len(records),
        tokens=sum(record.output_tokens or 0 for record in records),
        seconds=seconds,
        length=length_of(records, version),
        parent_length=length_of(before, parent),
        rolled_back=live == parent,
        reason=reasons[-1] if live == parent and reasons else "",
    )


def print_trials(trials: Sequence[Trial]) -> None:
    common.print_table(
        "Worse versions made live",
        ["noise", "its length", "its parent's", "requests", "tokens", "rolled back"],
        [
            [f"{t.noise:g}", t.length, t.parent_length, t.requests, t.tokens, str(t.rolled_back)]
            for t in trials
        ],
    )
    for trial in trials:
        if trial.reason:
            common.console.print(f"noise {trial.noise:g}: {trial.reason}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser("rollback", __doc__, max_tokens=128)
    parser.add_argument(
        "--noise", type=float, nargs="+", default=[1.0, 0.3, 0.1, 0.0], metavar="N",
        help="standard deviations of noise, one trial each (default: 1 0.3 0.1 0)",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=int, default=80, help="under one version at most (default: 80)"
    )
    parser.add_argument(
        "--before", type=int, default=10, help="under the parent, before (default: 10)"
    )
    parser.set_defaults(draft="auto")
    args = common.parse(parser, argv)
    if min(args.requests, args.before) < 1 or min(args.noise) < 0:
        raise common.BenchError("--requests and --before are at least 1, --noise at least 0")
    chosen = common.prompts_of(args)
    facts = common.machine_facts()
    flags = common.serve_flags(args, "--learning.publish-interval-s", "86400")
    trials: list[Trial] = []
    with (
        tempfile.TemporaryDirectory() as home,
        ServerProcess(Path(home), flags, start_deadline_s=args.start_deadline) as server,
    ):
        if server.status()["draft"]["origin"] == "untrained":
            raise common.BenchError("an untrained draft cannot get worse; give --draft FOLDER")
        prompts = list(chosen.prompts)
        for noise in args.noise:
            trials.append(run_trial(args, server, noise, prompts))
            print_trials(trials[-1:])
    print_trials(trials)
    common.write_json(
        args.json, common.report("rollback", facts, args, chosen) | {"trials": trials}
    )
    return 0


if __name__ == "__main__":
    common.run_main(main)
