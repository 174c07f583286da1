"""Break a server's parts on purpose, under load, one after the other, and count what that costs.

One server has to survive all of it. Four clients send completions all the time, every other one a stream. Of
every request it is known what became of it: served; cut, when the engine died under it and it was told so;
turned away, when there was no engine and it was told when to come back; or lost, which no request may be.
Meanwhile /health, /ready and every total of ours on /metrics are watched.

  engine      SIGKILL to the process that runs the model
  learner     SIGKILL to the learner, 20 times
  flood       random bytes at the learner's trace socket
  forged      traces of the right form that no engine sent, of another user and of the server's
  weights     a version's file cut, exchanged and removed, between its notice and its load
  live        the live version's file cut, and then the engine killed
  disk        not a byte left for the drafts and the learner's state (needs leave to mount)
  clock       the time of day goes back by an hour, for all processes
  silent      a learner that takes the connection and never says or publishes anything (another server)
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from clients.bench import chaos_faults, chaos_traces, common
from clients.bench.chaos_load import Load
from clients.bench.chaos_watch import Watch
from clients.process import ServerProcess

FLAGS = [
    "--max-model-len", "512", "--learning.checkpoint-interval-s", "2",
    "--learning.gate-tokens", "1000000000",
]  # fmt: skip
"""A checkpoint soon after each update; the learner judges no version of its own, so that what is live is
what was put there."""

MEGABYTES = 192
"""Of each small disk: room for the first draft and a checkpoint, and little more."""

SILENT = "silent"

Fault = Callable[[ServerProcess, Load], dict[str, Any]]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m clients.bench.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", help="names of faults, with commas between; default: all")
    add("--home", type=Path, help="a home folder with the embedded model, to be copied")
    add("--clients", type=int, default=4, metavar="N", help="default: 4")
    add("--engine-kills", type=int, default=3, metavar="N", help="default: 3")
    add("--learner-kills", type=int, default=20, metavar="N", help="default: 20")
    add("--flood-s", type=float, default=60.0, metavar="S", help="default: 60")
    add("--flood-mb", type=float, default=10.0, metavar="MB", help="a second; default: 10")
    add("--silent-s", type=float, default=60.0, metavar="S", help="default: 60")
    add("--start-deadline", type=float, default=600.0, metavar="S", help="default: 600")
    add("--json", type=Path, metavar="FILE", help="write everything measured here")
    return parser.parse_args(argv)


def faults(args: argparse.Namespace, clock: Path) -> dict[str, Fault]:
    return {
        "flood": lambda s, load: chaos_traces.garbage_flood(
            s, load, args.flood_s, args.flood_mb * 1e6
        ),
        "forged": lambda s, load: chaos_traces.forged_traces(s, load, 200),
        "weights": chaos_faults.weights_damaged,
        "live": chaos_faults.live_weights_damaged,
        "disk": chaos_faults.disk_full,
        "clock": lambda s, load: chaos_faults.clock_set_back(s, load, clock, 3600.0),
        "engine": lambda s, load: chaos_faults.engine_killed(s, load, args.engine_kills),
        "learner": lambda s, load: chaos_faults.learner_killed(s, load, args.learner_kills),
        SILENT: lambda s, load: chaos_traces.silent_learner(s, load, args.silent_s),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    clock, shifted = chaos_faults.shifted_clock(folder / "clock")
    known = faults(args, clock)
    chosen = args.only.split(",") if args.only else list(known)
    if unknown := set(chosen) - set(known):
        raise common.BenchError(f"there is no fault {sorted(unknown)[0]!r}")
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        shared = [name for name in chosen if name != SILENT]
        if shared:
            home = home_folder(args, folder / "all")
            try:
                stack.enter_context(chaos_faults.small_disks(home, MEGABYTES))
            except OSError as error:
                common.console.print(f"no fault of the disk: {error}")
                shared = [name for name in shared if name != "disk"]
            server = stack.enter_context(served(args, home, FLAGS, shifted))
            for name in shared:
                found[name] = tried(name, known[name], server, args.clients)
    if SILENT in chosen:
        with chaos_traces.mute(folder) as base:
            home = home_folder(args, folder / "silent")
            with served(args, home, [*FLAGS, "--learner", base], {}) as server:
                found[SILENT] = tried(SILENT, known[SILENT], server, args.clients)
    common.write_json(args.json, {"machine": common.machine_facts(), "faults": found})
    shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(passed(one) for one in found.values()) else 1


def home_folder(args: argparse.Namespace, folder: Path) -> Path:
    """A home of its own, with the models of --home."""
    home = folder / "home"
    home.mkdir(parents=True)
    if args.home is not None:
        for part in ("models", "models.lock"):
            (home / part).symlink_to((args.home / part).absolute())
    return home


def served(
    args: argparse.Namespace, home: Path, flags: list[str], environment: dict[str, str]
) -> ServerProcess:
    return ServerProcess(home, flags, env=environment, start_deadline_s=args.start_deadline)


def tried(name: str, fault: Fault, server: ServerProcess, clients: int) -> dict[str, Any]:
    """What a fault did; under ``failed`` why it could not be tried to its end."""
    begun = time.monotonic()
    figures: dict[str, Any] = {}
    with Watch(server) as watch, Load(server, clients) as load:
        try:
            load.wait_for_served(clients, 240)
            figures = fault(server, load)
        except (TimeoutError, httpx.HTTPError, OSError) as error:
            figures = {"failed": f"{type(error).__name__}: {error}", "log": server.tail()}
    figures = {
        **load.figures(),
        **figures,
        **watch.figures(),
        "engine_restarts": chaos_faults.total(server, "paceline_engine_restarts_total"),
        "seconds": round(time.monotonic() - begun),
    }
    common.console.print(name, figures)
    return figures


def passed(figures: dict[str, Any]) -> bool:
    """Whether nothing was lost that the fault did not cut, and no total went down."""
    return "failed" not in figures and not figures["lost"] and not figures["decreased_totals"]


if __name__ == "__main__":
    common.run_main(main)
