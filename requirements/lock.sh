#!/usr/bin/env bash
# Makes cpu.lock anew from cpu.in. Needs uv, and the CPU build of torch within its reach: pass a folder
# that holds the wheel as UV_FIND_LINKS, or leave that away where --torch-backend=cpu finds it.
set -euo pipefail
cd "$(dirname "$0")"
backend=()
[ -n "${UV_FIND_LINKS:-}" ] || backend=(--torch-backend=cpu)
uv pip compile "${backend[@]}" --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --no-emit-find-links --no-emit-package torch --override overrides.txt --generate-hashes \
  --custom-compile-command "requirements/lock.sh" --quiet cpu.in -o cpu.lock
