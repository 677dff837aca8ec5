#!/usr/bin/env bash
# Sets up a virtual environment, then checks style and types and runs the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup_venv.sh" examples,test transformers==5.24.0 accelerate peft
# Without their dependencies, which the tests don't need; psutil is there to write checkpoints. megatron-core declares
# Python 3.12 but has wheels for 3.11. DeepSpeed has no wheel; none of its operators is built.
DS_BUILD_OPS=0 "$bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
    --ignore-requires-python megatron-core==0.19.2 psutil deepspeed==0.19.8 hjson einops msgpack py-cpuinfo

cd "$root"
# Collecting the tests compiles what they import (beside mypy, which uses one core), once and not in each of the many
# processes that start together. Should it fail, the tests will say why.
unset PYTHONDONTWRITEBYTECODE
"$bin/python" -m pytest --collect-only --quiet > /dev/null 2>&1 &
collecting=$!
"$bin/ruff" check .
"$bin/ruff" format --check .
MYPYPATH="$root/examples" "$bin/mypy" --package cce_tp --module pretrain_gpt --module pretrain_megatron \
    --module pretrain_deepspeed --module finetune_transformers --module study
wait "$collecting" || true
# The tests start several processes each; without this every one of them would start a thread for each core.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Launchers that the tests start, if they are installed: torchrun, deepspeed.
export PATH="$bin:$PATH"
# Tests that take GPUs have them for themselves.
workers=()
[ "$gpus" -gt 0 ] || workers=(-n 2 --dist worksteal)
exec "$bin/python" -m pytest ${workers[@]+"${workers[@]}"} "$@"
