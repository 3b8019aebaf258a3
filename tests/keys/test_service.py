"""Keys: shown once, known by their hash."""

from sqlalchemy import select

from app import db
from app.keys import service
from app.keys.tables import ApiKey


def test_the_first_start_makes_a_project_and_a_key_and_later_ones_nothing(database: str) -> None:
    with db.write() as session:
        key = service.ensure_admin_key(session, None)
    assert key is not None
    assert key.startswith("sk-ty-")
    with db.write() as session:
        assert service.ensure_admin_key(session, None) is None
    with db.read() as connection:
        assert service.authenticate(connection, key) == service.DEFAULT_PROJECT_ID


def test_an_operators_key_is_taken_once(database: str) -> None:
    for expected in ("sk-of-an-operator", None):
        with db.write() as session:
            assert service.ensure_admin_key(session, "sk-of-an-operator") == expected


def test_an_operators_new_key_is_added_beside_the_old(database: str) -> None:
    for key in ("sk-old", "sk-new"):
        with db.write() as session:
            service.ensure_admin_key(session, key)
    with db.read() as connection:
        assert service.authenticate(connection, "sk-old") == service.authenticate(connection, "sk-new") is not None


def test_a_revoked_key_opens_nothing(database: str) -> None:
    with db.write() as session:
        key = service.create_key(session, service.create_project(session, "a").id, "a")
    with db.write() as session:
        session.scalars(select(ApiKey)).one().revoked_at = 1.0
    with db.read() as connection:
        assert service.authenticate(connection, key) is None


def test_the_database_never_holds_a_key_in_plain_text(database: str) -> None:
    with db.write() as session:
        key = service.ensure_admin_key(session, None)
    with db.read() as connection:
        assert key not in [str(value) for row in connection.execute(select(ApiKey.__table__)) for value in row]
