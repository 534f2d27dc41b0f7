#!/usr/bin/env bash
# From nothing to a real language model decoding real prompts: installs, then runs scripts/quickstart.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python scripts/quickstart.py "$@"
