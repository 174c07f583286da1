"""Log lines: for people by default, JSON on request. vLLM's own loggers are left alone."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def setup_logging(component: str, json: bool, level: str) -> None:
    """Send this process's log to standard error, each line naming ``component``."""
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
    ]
    renderer: Any
    if json:
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), pad_event_to=34, sort_keys=False
        )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger("paceline")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level)),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.clear_contextvars()


def get_logger(component: str) -> Any:
    """A logger taking an event and keyword details.

    Modules make theirs at import, before setup_logging: it must stay lazy, so no ``bind`` here.
    """
    return structlog.get_logger(f"paceline.{component}", component=component)
