"""A short fuzz of the running API; `python -m tests.fuzzing` is the long one."""

from pathlib import Path

import pytest

from app import db
from app.keys import service as keys
from app.keys.scopes import ALL_SCOPES
from tests import fuzzing, servers
from tests.conftest import Live

SECONDS = 25


@pytest.mark.slow
@pytest.mark.parametrize("api_server", ["postgresql"], indirect=True)
def test_no_call_gives_a_server_error_or_a_status_that_is_not_documented(
    live: Live, api_server: servers.Api, tmp_path: Path
) -> None:
    environment = dict(api_server.environment) | {"TUNEYARD_REQUESTS_PER_MINUTE": "0"}
    with db.write() as session:
        key = keys.create_key(session, live.project_id, "fuzzing", scopes=ALL_SCOPES).plaintext
    with servers.api(environment, tmp_path) as api:
        done = fuzzing.fuzz(api.url, key, SECONDS, seed=1)
    assert done.returncode == 0, done.stdout
    assert fuzzing.count(done.stdout) > 100
