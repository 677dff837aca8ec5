#!/usr/bin/env bash
# Sets up a virtual environment, then checks style and types and runs the tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup_venv.sh" examples,test
# Without its dependencies, which the tests don't need; it declares Python 3.12 but has wheels for 3.11.
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --ignore-requires-python \
    megatron-core==0.19.2 psutil # psutil: to write checkpoints
"$bin/python" -m pip install --quiet --disable-pip-version-check --no-compile transformers==5.24.0 accelerate peft
# DeepSpeed has no wheel; none of its operators is built, and what only they need is left out.
DS_BUILD_OPS=0 "$bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
    deepspeed==0.19.8 hjson einops msgpack py-cpuinfo

cd "$root"
"$bin/ruff" check .
"$bin/ruff" format --check .
MYPYPATH="$root/examples" "$bin/mypy" --package cce_tp --module pretrain_gpt --module pretrain_megatron \
    --module pretrain_deepspeed --module finetune_transformers --module study
# The tests start several processes each; without this every one of them would start a thread for each core.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$bin/python" -m pytest "$@"
