"""Keys: shown once, known by their hash."""

from typing import Any

import pytest
from sqlalchemy import select, update

from app import db
from app.errors import Conflict, Unauthenticated
from app.keys import scopes, service
from app.keys.tables import ApiKey


def test_the_first_start_makes_a_project_and_a_key_and_later_ones_nothing(database: str) -> None:
    with db.write() as session:
        key = service.ensure_admin_key(session, None)
    assert key is not None
    assert key.startswith("sk-ty-")
    with db.write() as session:
        assert service.ensure_admin_key(session, None) is None
    with db.read() as connection:
        assert service.authenticate(connection, key).project_id == service.DEFAULT_PROJECT_ID


def test_an_operators_key_is_taken_once(database: str) -> None:
    for expected in ("sk-of-an-operator", None):
        with db.write() as session:
            assert service.ensure_admin_key(session, "sk-of-an-operator") == expected


def test_an_operators_new_key_is_added_beside_the_old(database: str) -> None:
    for key in ("sk-old", "sk-new"):
        with db.write() as session:
            service.ensure_admin_key(session, key)
    with db.read() as connection:
        callers = [service.authenticate(connection, key) for key in ("sk-old", "sk-new")]
    assert callers[0].project_id == callers[1].project_id
    assert callers[0].key_id != callers[1].key_id


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return service.create_project(session, "a").id


def create(project_id: str, **fields: Any) -> service.NewKey:
    with db.write() as session:
        return service.create_key(session, project_id, "a", **fields)


def code_of(plaintext: str) -> str | None:
    """The error's code, or None for a key that opens."""
    try:
        with db.read() as connection:
            service.authenticate(connection, plaintext)
    except Unauthenticated as error:
        return error.code
    return None


def age(seconds: float) -> None:
    """All keys are older by so much, and end as much sooner."""
    with db.write() as session:
        session.execute(update(ApiKey).values(created_at=ApiKey.created_at - seconds, expires_at=ApiKey.expires_at - seconds))


def test_a_revoked_key_opens_nothing(project_id: str) -> None:
    key = create(project_id)
    with db.write() as session:
        service.revoke_key(session, project_id, key.row.id)
    assert code_of(key.plaintext) == "invalid_api_key"


def test_a_key_opens_until_it_expires(project_id: str) -> None:
    key = create(project_id, lifetime_s=100.0)
    assert code_of(key.plaintext) is None
    age(101)
    assert code_of(key.plaintext) == "expired_api_key"


def test_a_rotated_key_has_the_same_scopes_and_lifetime_and_the_old_one_ends(project_id: str) -> None:
    old = create(project_id, scopes=["jobs:read"], lifetime_s=100.0)
    age(60)
    with db.write() as session:
        new = service.rotate_key(session, project_id, old.row.id, keep_old_s=30.0)
    assert (new.row.name, new.row.scopes) == ("a", ["jobs:read"])
    assert code_of(old.plaintext) is code_of(new.plaintext) is None
    age(35)
    assert code_of(old.plaintext) == "expired_api_key"
    assert code_of(new.plaintext) is None
    age(70)
    assert code_of(new.plaintext) == "expired_api_key"


def test_keeping_the_old_key_never_lengthens_its_life(project_id: str) -> None:
    old = create(project_id, lifetime_s=10.0)
    with db.write() as session:
        service.rotate_key(session, project_id, old.row.id, keep_old_s=1000.0)
    age(11)
    assert code_of(old.plaintext) == "expired_api_key"


def test_a_key_that_has_ended_is_not_rotated(project_id: str) -> None:
    key = create(project_id)
    with db.write() as session:
        service.revoke_key(session, project_id, key.row.id)
    with db.write() as session, pytest.raises(Conflict):
        service.rotate_key(session, project_id, key.row.id)


def test_the_last_use_is_noted_at_most_once_a_minute(project_id: str) -> None:
    key = create(project_id)
    used: list[float | None] = []
    for _ in range(2):
        service.note_use(key.row.id)
        with db.read() as connection:
            used.append(connection.execute(select(ApiKey.last_used_at)).scalar_one())
            assert not service.authenticate(connection, key.plaintext).is_stale
    assert used[0] is not None
    assert used[0] == used[1]


@pytest.mark.parametrize(
    ("held", "asked", "allowed"),
    [
        (["jobs:read"], "jobs:read", True),
        (["jobs:read"], "jobs:write", False),
        (["jobs:*"], "jobs:write", True),
        (["jobs:*"], "files:read", False),
        (["jobs:*", "files:*", "models:*", "chat"], "admin", False),
        (["admin"], "jobs:read", False),
    ],
)
def test_a_scope_opens_its_own_area_only(held: list[str], asked: str, allowed: bool) -> None:
    assert scopes.allow(held, asked) is allowed


def test_the_database_never_holds_a_key_in_plain_text(database: str) -> None:
    with db.write() as session:
        key = service.ensure_admin_key(session, None)
    with db.read() as connection:
        assert key not in [str(value) for row in connection.execute(select(ApiKey.__table__)) for value in row]
