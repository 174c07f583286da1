"""vLLM general plugin: runs in every engine process before the worker is built."""

from __future__ import annotations


def register() -> None:
    from rlcore.engine.fixes import apply_fixes
    from rlcore.engine.interrupt import leave_interrupts_to_parent
    from rlcore.engine.orphan import end_with_parent_process
    from rlcore.engine.spinning import wait_without_spinning

    apply_fixes()
    wait_without_spinning()
    end_with_parent_process()
    leave_interrupts_to_parent()
