"""``python -m cce_tp.launch``: the command ``cce-tp``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
