"""Which of many cases every run of the tests takes, and which only a thorough one (``--slow``)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def slow_too(config: pytest.Config) -> bool:
    """Whether this is a thorough run."""
    return bool(config.getoption("--slow")) or os.environ.get("CCE_TP_TEST_SLOW", "") not in ("", "0")


def some_of(cases: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """All cases, those marked slow that are not among ``always``."""
    cases, always = list(cases), list(always)
    unknown = [case for case in always if case not in cases]
    if unknown:
        raise ValueError(f"no such cases: {unknown}")
    return [case if case in always else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
