"""`tuneyard keys` and `tuneyard projects`, run as an operator runs them."""

import json

from typer.testing import CliRunner

from app import db
from app.audit import service as audit
from app.cli import cli
from app.keys import service


def run(*words: str) -> str:
    """What a command prints."""
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_a_projects_key_is_made_listed_rotated_and_revoked(database: str) -> None:
    project = run("projects", "create", "team blue")
    run("projects", "set", project, "--max-gpus", "4")
    assert json.loads(run("projects", "list"))["max_gpus"] == 4
    first = run("keys", "create", "ci", "--project", project, "--scope", "jobs:read", "--scope", "files:*")
    listed = json.loads(run("keys", "list", "--project", project))
    assert listed["scopes"] == ["jobs:read", "files:*"]
    assert first not in str(listed)
    second = run("keys", "rotate", listed["id"], "--project", project)
    with db.read() as connection:
        caller = service.authenticate(connection, second)
    assert caller.scopes == {"jobs:read", "files:*"}
    run("keys", "revoke", caller.key_id, "--project", project)
    ends = [json.loads(line) for line in run("keys", "list", "--project", project).splitlines()]
    with db.read() as connection:
        entries, _ = audit.list_entries(connection, audit.Filter(), after=None, limit=10)
    made = ["project.created", "project.updated", "api_key.created", "api_key.rotated", "api_key.deleted"]
    assert [entry.type for entry in reversed(entries)] == made
    assert all(entry.operator for entry in entries)
    assert [(bool(key["revoked_at"]), bool(key["expires_at"])) for key in ends] == [(True, False), (False, True)]


def test_what_is_refused_is_one_line(database: str) -> None:
    for words in (["revoke", "key_x"], ["create", "a", "--project", "proj_x"], ["create", "a", "--scope", "all"]):
        result = CliRunner().invoke(cli, ["keys", *words])
        assert result.exit_code == 1
        assert result.stderr.startswith("tuneyard: ")
        assert len(result.stderr.splitlines()) == 1
