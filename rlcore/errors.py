"""Errors that end a command with one line on standard error and exit code 2."""

from __future__ import annotations


class PacelineError(Exception):
    """What is wrong and what to do, in one line."""


class UsageError(PacelineError):
    """Flags, environment or configuration file that cannot be used."""
