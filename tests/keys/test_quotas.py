"""What a project may use: set by an operator, refused with a clear error or waited for."""

import io
from datetime import UTC, datetime
from typing import Any

import httpx2
import pytest
from sqlalchemy import select, update

from app import db
from app.errors import InvalidRequest, QuotaExceeded
from app.files import service as files
from app.jobs import service
from app.jobs.schemas import JobCreate
from app.jobs.tables import Wait
from app.keys import service as keys
from app.keys.scopes import ALL_SCOPES
from app.nodes import placement
from app.nodes import service as nodes
from app.nodes.service import NodeReport
from app.nodes.tables import Placement
from tests import factories
from tests.conftest import Live

BASE = {"model": "openai/gpt-oss-20b", "training_file": "hf://datasets/HuggingFaceH4/Multilingual-Thinking?split=train"}
ROW = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n'


@pytest.fixture
def project_id(database: str) -> str:
    """A project on one node of eight GPUs."""
    gpus = [{"uuid": str(i), "name": "H200", "memory_bytes": 1} for i in range(8)]
    with db.write() as session:
        nodes.register(session, NodeReport("g", "127.0.0.1", "gpu", 8, gpus, {}))
        return keys.create_project(session, "test").id


def give(project_id: str, **quotas: Any) -> None:
    with db.write() as session:
        keys.update_project(session, project_id, quotas)


def create(project_id: str, ranks: int = 1) -> str:
    body = BASE | {"spec": {"parallelism": {"nproc_per_node": ranks}}}
    with db.write() as session:
        return service.create_job(session, project_id, JobCreate.model_validate(body)).id


def upload(project_id: str) -> None:
    files.create_file(project_id, io.BytesIO(ROW), "rows.jsonl", "fine-tune")


@pytest.mark.parametrize(
    ("quota", "blocks"), [({"max_running_jobs": 1}, "quota.running_jobs"), ({"max_gpus": 1}, "quota.gpus")]
)
def test_a_job_beyond_what_may_run_at_once_waits_and_says_so(project_id: str, quota: dict[str, int], blocks: str) -> None:
    give(project_id, **quota)
    _, second = create(project_id), create(project_id)
    factories.pass_checks()
    assert placement.place_all() == 1
    with db.write() as session:
        assert session.get_one(Wait, second).blocking_resource == blocks
    give(project_id, **dict.fromkeys(quota))
    assert placement.place_all() == 1


def test_a_job_that_its_project_could_never_start_is_refused(project_id: str) -> None:
    give(project_id, max_gpus=2)
    with pytest.raises(InvalidRequest, match="may use 2 GPU") as caught:
        create(project_id, ranks=4)
    assert caught.value.param == "spec.parallelism"


class TestGpuHours:
    """Four GPUs were held for half an hour, until a moment ago."""

    @pytest.fixture
    def job_id(self, project_id: str) -> str:
        job_id = create(project_id, ranks=4)
        factories.pass_checks()
        placement.place_all()
        placement.claim(job_id, 1, 0, pid=1)
        with db.write() as session:
            session.execute(update(Placement).values(placed_at=db.now() - 1800))
        return job_id

    def used(self, project_id: str) -> float:
        with db.write() as session:
            return nodes.gpu_hours_this_month(session, project_id)

    def test_the_hours_of_running_and_ended_jobs_count(self, project_id: str, job_id: str) -> None:
        expected = 4 * min(1800.0, seconds_of_this_month()) / 3600
        assert self.used(project_id) == pytest.approx(expected, abs=0.05)
        with db.write() as session:
            nodes.release(session, job_id, 1)
        assert self.used(project_id) == pytest.approx(expected, abs=0.05)

    def test_once_used_a_new_job_is_refused_until_more_is_given(self, project_id: str, job_id: str) -> None:
        give(project_id, max_gpu_hours_per_month=0.0)
        with pytest.raises(QuotaExceeded, match="GPU-hours this month") as caught:
            create(project_id)
        assert (caught.value.status, caught.value.code) == (429, "gpu_hours_exceeded")
        give(project_id, max_gpu_hours_per_month=1000.0)
        create(project_id)


class TestStorage:
    def test_an_upload_that_does_not_fit_is_refused_and_leaves_nothing(self, project_id: str) -> None:
        give(project_id, max_storage_bytes=len(ROW) + 10)
        upload(project_id)
        with pytest.raises(QuotaExceeded, match="delete files") as caught:
            upload(project_id)
        assert caught.value.code == "storage_exceeded"
        with db.write() as session:
            assert files.stored_bytes(session, project_id) == len(ROW)

    def test_results_count_and_a_full_project_starts_no_job(self, project_id: str) -> None:
        factories.add_artifact(factories.create_job(project_id, status="succeeded"), "adapter", b"x" * 100)
        give(project_id, max_storage_bytes=100)
        with pytest.raises(QuotaExceeded):
            create(project_id)

    def test_another_projects_files_do_not(self, project_id: str) -> None:
        with db.write() as session:
            other = keys.create_project(session, "other").id
        upload(other)
        give(project_id, max_storage_bytes=len(ROW))
        upload(project_id)


class TestRoute:
    @pytest.fixture
    def admin(self, live: Live) -> dict[str, str]:
        with db.write() as session:
            return {
                "Authorization": f"Bearer {keys.create_key(session, live.project_id, 'admin', scopes=ALL_SCOPES).plaintext}"
            }

    def test_an_admin_sets_and_lifts_quotas(self, http: httpx2.Client, live: Live, admin: dict[str, str]) -> None:
        path = f"/v1/projects/{live.project_id}"
        answer = http.patch(path, headers=admin, json={"max_gpus": 8, "weight": 2}).json()
        assert (answer["object"], answer["max_gpus"], answer["weight"], answer["max_running_jobs"]) == ("project", 8, 2, None)
        answer = http.patch(path, headers=admin, json={"max_gpus": None}).json()
        assert (answer["max_gpus"], answer["weight"]) == (None, 2)

    def test_any_other_key_may_not(self, http: httpx2.Client, live: Live) -> None:
        assert http.patch(f"/v1/projects/{live.project_id}", json={"max_gpus": 8}).status_code == 403

    @pytest.mark.parametrize("body", [{"weight": None}, {"weight": 0}, {"max_gpus": -1}, {"max_gpu": 1}])
    def test_what_makes_no_sense_is_named(
        self, http: httpx2.Client, live: Live, admin: dict[str, str], body: dict[str, Any]
    ) -> None:
        answer = http.patch(f"/v1/projects/{live.project_id}", headers=admin, json=body)
        assert answer.status_code == 422
        assert next(iter(body)) in answer.json()["error"]["message"]

    def test_an_upload_beyond_the_quota_is_answered_once_with_429(
        self, http: httpx2.Client, live: Live, admin: dict[str, str]
    ) -> None:
        http.patch(f"/v1/projects/{live.project_id}", headers=admin, json={"max_storage_bytes": 1})
        answer = http.post("/v1/files", files={"file": ("rows.jsonl", ROW)}, data={"purpose": "fine-tune"})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
        assert answer.json()["error"]["type"] == "insufficient_quota"


def seconds_of_this_month() -> float:
    """By the database's clock."""
    with db.read() as connection:
        at = datetime.fromtimestamp(connection.execute(select(db.now())).scalar_one(), UTC)
    return (at - at.replace(day=1, hour=0, minute=0, second=0, microsecond=0)).total_seconds()
