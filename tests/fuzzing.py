"""Schemathesis against the running API: whatever the OpenAPI document allows, and much that it does not.

    python -m tests.fuzzing [--seconds 1800] [--seed 1]

It ends with 0 where no answer was a server error or had a status that the document lacks.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from sqlalchemy.orm import Session

from app import db, migrate
from app.keys import service as keys
from app.keys.scopes import ALL_SCOPES
from tests import servers

CHECKS = "not_a_server_error,status_code_conformance"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers.postgres() as postgres, servers.valkey() as broker:
        environment = {
            "TUNEYARD_DATABASE_URL": postgres.create_database(),
            "TUNEYARD_DATA_DIR": folder,
            "TUNEYARD_BROKER_URL": broker,
            "TUNEYARD_REQUESTS_PER_MINUTE": "0",
        }
        migrate.upgrade(environment["TUNEYARD_DATABASE_URL"])
        with servers.api(environment, Path(folder)) as api:
            done = fuzz(api.url, admin_key(environment["TUNEYARD_DATABASE_URL"]), given.seconds, given.seed)
    sys.stdout.write(f"{done.stdout}\n{count(done.stdout)} calls\n")
    sys.exit(done.returncode)


def fuzz(url: str, api_key: str, seconds: int, seed: int) -> "subprocess.CompletedProcess[str]":
    """One run with a key that may do everything."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {api_key}", "--checks", CHECKS, "--phases", "coverage,fuzzing"]
    command += ["--max-time", str(seconds), "--seed", str(seed), "--request-timeout", "30", "--continue-on-failure"]
    command += ["--suppress-health-check", "all", "--warnings", "off", "--no-color"]
    with tempfile.TemporaryDirectory() as folder:  # it keeps a folder of examples where it runs
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def count(report: str) -> int:
    """How many calls a run has made."""
    found = re.search(r"([\d,]+) generated", report)
    return int(found.group(1).replace(",", "")) if found else 0


def admin_key(database_url: str) -> str:
    """A key of a new project in this database."""
    engine = db.make_engine(database_url)
    with Session(engine) as session, session.begin():
        project = keys.create_project(session, "fuzzing")
        key = keys.create_key(session, project.id, "fuzzing", scopes=ALL_SCOPES).plaintext
    engine.dispose()
    return key


if __name__ == "__main__":
    main()
