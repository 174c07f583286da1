"""``paceline serve``: bring up a server with its learner."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from rlcore.engine.options import EngineOptions
from rlcore.errors import PacelineError
from rlcore.first_draft import first_draft
from rlcore.home import Home
from rlcore.live_drafts import DraftError, expected_rates
from rlcore.log import get_logger, setup_logging
from rlcore.parent import end_with_parent
from rlcore.settings import ServeSettings, load
from rlcore.target import local_model, model_identity
from rlcore.transport import EndpointError, learner_endpoints
from server.drafts import Drafts
from server.policy import TARGET_VERSION, Policy

log = get_logger("server")


class StartError(PacelineError):
    """The server cannot start like this."""


def main(argv: list[str]) -> int:
    settings = load(ServeSettings, argv, "paceline serve")
    setup_logging("server", settings.log_json, settings.log_level)
    if settings.parent_pid is not None:
        end_with_parent(settings.parent_pid)
    home = Home(settings.home)
    with home.lock("serve"):
        return _serve(settings, home)


def _serve(settings: ServeSettings, home: Home) -> int:
    from rlcore.engine.launch import engine_arguments, prepare_environment

    prepare_environment(settings)
    target = local_model(settings.target, home)
    target_id = model_identity(target)
    sock = _listen(settings.host, settings.port)
    drafts = _drafts(settings, home, target, target_id)
    link_endpoint = f"ipc://{home.run}/engine"
    learner_base = _learner_base(settings, home)
    traces = control = None
    if learner_base is not None:
        encrypted = settings.curve_secret_file is not None
        traces, control = learner_endpoints(learner_base, encrypted=encrypted)
    options = EngineOptions(
        target_version=TARGET_VERSION,
        draft_version=drafts.live,
        draft_rates=expected_rates(drafts.manifest()),
        speculation=settings.speculation,
        link_endpoint=link_endpoint,
        trace_endpoint=traces if settings.capture else None,
        capture_rate=settings.capture_rate,
        capture_span_tokens=settings.capture_span_tokens,
        capture_queue=settings.capture_queue,
        policy_rank=settings.policy_lora_rank,
        trace_secret_file=_name(settings.curve_secret_file),
        trace_server_key_file=_name(settings.curve_server_key_file),
    )
    from server.learner_process import LearnerProcess
    from server.serving import serve

    given = settings.target
    name = settings.served_model_name or (given if _is_hub_id(given, target) else target.name)
    args = engine_arguments(settings, target, name, drafts.store.folder(drafts.live), options)
    policy = Policy(target, TARGET_VERSION, adapters=settings.policy_lora_rank > 0)
    learner = None
    if settings.learner == "local" and learner_base is not None:
        learner = LearnerProcess(_learner_arguments(settings, home, target, learner_base))
    try:
        with sock:
            asyncio.run(
                serve(settings, args, sock, drafts, link_endpoint, control, learner, policy)
            )
    except EndpointError as error:
        raise StartError(str(error)) from None
    return 0


def _name(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _is_hub_id(given: str, folder: Path) -> bool:
    """A hub model lies in a folder named after its commit; clients know it by its id."""
    return given.count("/") == 1 and not Path(given).expanduser().is_dir() and folder.is_dir()


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is known before anything is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
        ) from None
    return sock


def _drafts(settings: ServeSettings, home: Home, target: Path, target_id: str) -> Drafts:
    """The drafts of this target; the first version is made or imported if need be."""
    store = first_draft(settings, home, target, target_id)
    try:
        drafts = Drafts.load(store, target_id, settings.draft_method)
    except DraftError as error:
        raise StartError(str(error)) from None
    if drafts is None:
        raise StartError(f"{store.root} holds no live draft; delete the folder to start anew")
    return drafts


def _learner_base(settings: ServeSettings, home: Home) -> str | None:
    if settings.learner == "off":
        return None
    if settings.learner == "local":
        return f"ipc://{home.run}/learner"
    return settings.learner


def _learner_arguments(settings: ServeSettings, home: Home, target: Path, base: str) -> list[str]:
    """The embedded learner's flags: what this server was told, passed on.

    It reads the server's file too, and not another one that lies in the working folder.
    """
    arguments = [
        "--home", str(home.root),
        "--bind", base,
        "--target", str(target),
        "--method", settings.draft_method,
        "--log-level", settings.log_level,
        "--speculative-tokens", str(settings.speculative_tokens),
        "--parent-pid", str(os.getpid()),
        "--retention-hours", str(settings.retention_hours),
        "--log-json" if settings.log_json else "--no-log-json",
    ]  # fmt: skip
    if settings.config_file is not None:
        arguments += ["--config", str(settings.config_file)]
    for name, value in settings.learning.model_dump(exclude_none=True).items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments
