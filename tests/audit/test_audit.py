"""Who did what to which object, from where: every change and nothing else, for admins, never to be taken back."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from sqlalchemy import delete, text, update
from sqlalchemy.exc import DatabaseError

from app import db
from app.audit import service
from app.audit.tables import Entry
from app.keys import service as keys
from app.keys.scopes import ALL_SCOPES
from tests.conftest import Live

JOB: Any = {"model": "openai/gpt-oss-20b", "training_file": "hf://datasets/a/b"}


@pytest.fixture
def admin(live: Live) -> Iterator[OpenAI]:
    """The SDK with an admin key of the project."""
    with db.write() as session:
        key = keys.create_key(session, live.project_id, "admin", scopes=ALL_SCOPES).plaintext
    with OpenAI(base_url=f"{live.url}/v1", api_key=key, admin_api_key=key) as sdk:
        yield sdk


def of_project(admin: OpenAI, live: Live, **wanted: Any) -> list[Any]:
    return list(admin.admin.organization.audit_logs.list(project_ids=[live.project_id], **wanted))


def test_a_change_is_listed_with_actor_object_origin_and_request(admin: OpenAI, live: Live, client: OpenAI) -> None:
    job = client.fine_tuning.jobs.create(**JOB)
    client.fine_tuning.jobs.cancel(job.id)
    client.fine_tuning.jobs.list()
    cancelled, created = of_project(admin, live)
    assert (created.type, cancelled.type) == ("job.created", "job.cancelled")
    assert (created.object_id, cancelled.object_id) == (job.id, job.id)
    assert created.request_id == job._request_id
    assert created.ip_address == "127.0.0.1"
    assert "OpenAI" in created.user_agent
    assert (created.actor.type, created.project.id) == ("api_key", live.project_id)
    with db.read() as connection:
        assert created.actor.api_key.id == keys.authenticate(connection, live.api_key).key_id


def test_everything_that_is_made_or_taken_away_is_named(admin: OpenAI, live: Live, client: OpenAI) -> None:
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="user_data")
    client.files.delete(file.id)
    client.post("/secrets", body={"name": "hub", "value": "a secret value".replace(" ", "-")}, cast_to=object)
    endpoint = client.webhooks.create(name="a", url="https://a.invalid/", event_types=["fine_tuning.job.failed"])
    client.webhooks.rotate_secret(endpoint.id)
    path = f"/projects/{live.project_id}"
    made: Any = admin.post(f"{path}/api_keys", body={"name": "a"}, cast_to=object)
    admin.patch(path, body={"weight": 2}, cast_to=object)
    entries = of_project(admin, live)
    assert [(entry.type, entry.object_id) for entry in reversed(entries)] == [
        ("file.created", file.id),
        ("file.deleted", file.id),
        ("secret.created", "hub"),
        ("webhook_endpoint.created", endpoint.id),
        ("webhook_secret.rotated", endpoint.id),
        ("api_key.created", made["id"]),
        ("project.updated", live.project_id),
    ]
    assert "a-secret-value" not in str([entry.to_dict() for entry in entries])


def test_what_was_refused_was_not_done(admin: OpenAI, live: Live, http: httpx2.Client) -> None:
    assert http.post("/v1/fine_tuning/jobs", json={}).status_code == 422
    assert http.delete("/v1/files/file-x").status_code == 404
    assert http.post("/v1/projects", json={"name": "a"}).status_code == 403
    assert of_project(admin, live) == []


def test_the_log_is_filtered_and_paged(admin: OpenAI, live: Live, client: OpenAI) -> None:
    jobs = [client.fine_tuning.jobs.create(**JOB, suffix=str(number)).id for number in range(3)]
    client.fine_tuning.jobs.cancel(jobs[0])
    assert [entry.object_id for entry in of_project(admin, live, event_types=["job.created"], limit=2)] == jobs[::-1]
    assert [entry.type for entry in of_project(admin, live, resource_ids=[jobs[0]])] == ["job.cancelled", "job.created"]
    assert of_project(admin, live, effective_at={"lt": 1_000_000}) == []
    assert len(of_project(admin, live, effective_at={"gte": 1_000_000})) == 4


def test_only_admins_read_it(http: httpx2.Client) -> None:
    assert http.get("/v1/organization/audit_logs").status_code == 403


def test_the_database_itself_keeps_every_line(database: str) -> None:
    service.record(Entry(type="job.created"))
    changes = [update(Entry).values(type="nothing"), delete(Entry)]
    if database.startswith("postgresql"):
        changes.append(text("TRUNCATE audit_entries"))  # type: ignore[arg-type]
    for change in changes:
        with pytest.raises(DatabaseError, match="append-only"), db.write() as session:
            session.execute(change)
    with db.read() as connection:
        entries, _ = service.list_entries(connection, service.Filter(), after=None, limit=10)
    assert [entry.type for entry in entries] == ["job.created"]


@pytest.mark.parametrize(
    ("operation", "named"),
    [
        ("create_job", "job.created"),
        ("cancel_job", "job.cancelled"),
        ("rerun_job", "job.rerun"),
        ("resume_node", "node.resumed"),
        ("drain_node", "node.drained"),
        ("delete_api_key", "api_key.deleted"),
        ("test_webhook_endpoint", "webhook_endpoint.tested"),
        ("replay_webhook_delivery", "webhook_delivery.replayed"),
    ],
)
def test_an_entrys_type_is_what_happened_to_which_object(operation: str, named: str) -> None:
    assert service.type_of(operation) == named
