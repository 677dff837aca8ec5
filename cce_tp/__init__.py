"""Cut cross-entropy over a tensor-parallel group."""

__version__ = "0.1.0"
