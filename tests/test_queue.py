"""Messages leave when the rows they tell of can be seen."""

import pytest

from app import db, queue


def test_a_savepoint_is_no_commit(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(queue.celery, "send_task", lambda task, **_: sent.append(task))
    with db.write() as session:
        with session.begin_nested():
            queue.send_after_commit(session, "place")
        assert sent == []
    assert sent == ["place"]


def test_a_rollback_sends_nothing(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(queue.celery, "send_task", lambda task, **_: sent.append(task))
    with db.write() as session:
        queue.send_after_commit(session, "place")
        session.rollback()
    assert sent == []
