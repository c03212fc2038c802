"""What commands leave for the next ones on a machine."""

from __future__ import annotations

from trainer.storage import cache


def test_what_a_machine_was_told_is_no_news(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert [cache.is_news("this"), cache.is_news("this"), cache.is_news("that")] == [True, False, True]
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # nothing can be noted
    assert [cache.is_news("this"), cache.is_news("this")] == [True, True]
