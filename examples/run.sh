#!/usr/bin/env bash
# Sets up a virtual environment and pre-trains a GPT: one process for each GPU, or two on the CPU.
# Arguments go to pretrain_gpt.py: bash examples/run.sh --steps 100 --resume
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../launch/setup_venv.sh" examples

processes="$gpus"
if [ "$gpus" -eq 0 ]; then
    processes=2
    threads=$(($(nproc) / processes))
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
    # Let glibc keep freed blocks of any size. By default it returns large ones to the kernel, which has to clear them
    # anew at every use: a quarter of a step.
    export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-4294967296}"
    export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-8589934592}"
fi
exec "$bin/torchrun" --standalone --nproc_per_node "$processes" "$root/examples/pretrain_gpt.py" "$@"
