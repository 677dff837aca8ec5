"""Less time in Triton's interpreter, which puts its own operations into ``triton.language`` anew at every call of a
function by a kernel, though the launch has done so already: a third of the time, for kernels made of small functions.

Nothing else changes; and nothing at all where this version of Triton does it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


def patch_once_a_launch() -> None:
    """Until a launch ends, what it has put in place stays there, and is not put there again."""
    import triton.language as tl
    from triton.runtime import interpreter

    original: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if original is None or not hasattr(scope_type, "restore"):
        return
    in_place: set[ModuleType] = set()

    def patch(fn: Any) -> Any:
        wanted = {value for value in fn.__globals__.values() if value is tl or value is tl.core}
        if wanted and wanted <= in_place:
            return scope_type()  # type: ignore[misc]
        scope = original(fn)
        if not in_place:  # a launch: what its functions ask for besides is left in place, as without this

            def restore(restored: Callable[[], None] = scope.restore) -> None:
                in_place.clear()
                restored()

            scope.restore = restore
        in_place.update(wanted)
        return scope

    interpreter._patch_lang = patch
