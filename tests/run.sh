#!/usr/bin/env bash
# Sets up a virtual environment, then checks style and types and runs the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup_venv.sh" examples,test

cd "$root"
"$bin/ruff" check .
"$bin/ruff" format --check .
MYPYPATH="$root/examples" "$bin/mypy" --package cce_tp --module pretrain_gpt
# The tests start several processes each; without this every one of them would start a thread for each core.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$bin/python" -m pytest "$@"
