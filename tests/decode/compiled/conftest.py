"""Fixtures of tests of compiled steps."""

from __future__ import annotations

import pytest

from decode import cache, session


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short texts outgrow windows and caches."""
    monkeypatch.setattr(cache, "BLOCK", 16)
    monkeypatch.setattr(cache, "MIN_GROWTH", 16)
    monkeypatch.setattr(session, "AHEAD", 4)
