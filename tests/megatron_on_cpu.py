"""Run a script that uses megatron-core, which needs CUDA, on a machine without a GPU: with the tests' shims.

torchrun --standalone --nproc_per_node 2 tests/megatron_on_cpu.py examples/pretrain_megatron.py --tp 2
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import megatron_shims


def main() -> None:
    """The script and its arguments follow on the command line."""
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(script.parent))
    megatron_shims.prepare()
    with megatron_shims.training():
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
