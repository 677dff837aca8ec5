"""Starting and inspecting runs: ``initialize`` and ``finalize``, and the command ``cce-tp``."""

from .runtime import Process, Runtime, choose_device, discover, finalize, initialize

__all__ = ["Process", "Runtime", "choose_device", "discover", "finalize", "initialize"]
