#!/usr/bin/env bash
# usage: tools/develop.sh [FOLDER]
#
# A place to work in, in FOLDER (.venv): a virtual environment with every distribution editable, the tools of tests, style
# and types, nvrtc and torch; hiprtc in FOLDER/hip; the hooks of pre-commit. PYTHON names the interpreter to start from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-.venv}

"${PYTHON:-python3.11}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    -e '.[dev,site,bench]' -e './plugins/cuda[cu13]' -e ./plugins/rocm -e ./plugins/rocm_emulator torch
"$folder/bin/pre-commit" install
tools/get-hiprtc.sh "$folder/hip" ||
    echo "develop.sh: no hiprtc; what needs it is skipped (see CONTRIBUTING.md)" >&2
echo "Now: $folder/bin/pytest -n 2 tests/unit, or with hiprtc: $folder/hip/run $folder/bin/python -m pytest …"
