#!/usr/bin/env bash
# Installs what is missing, then checks format, lint and types and runs the tests.
# Arguments go to pytest: scripts/test.sh -k beam. WORKERS=1 runs the tests one after the other.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh

bin=.venv/bin
folders=(decoding_jax train scripts configs tests)
"$bin/ruff" format --check "${folders[@]}"
"$bin/ruff" check "${folders[@]}"
"$bin/mypy"
JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} "$bin/python" -m pytest -n "${WORKERS:-2}" --dist worksteal "$@"
