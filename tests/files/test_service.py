"""Files and the jobs that read them, at the same moment; and files whose time is over."""

import io
from threading import Thread

import pytest
from sqlalchemy import update

from app import db, storage
from app.errors import Conflict, InvalidRequest, NotFound
from app.files import service as files
from app.files.tables import File
from app.jobs import service as jobs
from app.jobs.schemas import JobCreate
from app.keys import service as keys
from tests import factories

ROW = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'


@pytest.fixture
def project_id(database: str) -> str:
    with db.write() as session:
        return keys.create_project(session, "test").id


@pytest.fixture
def file_id(project_id: str) -> str:
    return files.create_file(project_id, io.BytesIO(ROW), "a.jsonl", "fine-tune").id


def job_on(file_id: str) -> JobCreate:
    return JobCreate.model_validate({"model": "openai/gpt-oss-20b", "training_file": file_id})


def test_a_file_is_not_deleted_under_a_job_that_is_being_created(project_id: str, file_id: str) -> None:
    refused: list[str | None] = []

    def delete() -> None:
        try:
            files.delete_file(project_id, file_id)
        except Conflict as error:
            refused.append(error.code)

    deleting = Thread(target=delete)
    with db.write() as session:
        jobs.create_job(session, project_id, job_on(file_id))
        deleting.start()
        deleting.join(0.5)  # it could get through here
    deleting.join()
    assert refused == ["file_in_use"]
    assert storage.keys("files") == [f"files/{file_id}"]


def test_a_job_on_a_file_that_was_deleted_is_refused(project_id: str, file_id: str) -> None:
    files.delete_file(project_id, file_id)
    with db.write() as session, pytest.raises(InvalidRequest, match="No such file"):
        jobs.create_job(session, project_id, job_on(file_id))


def expire(file_id: str) -> None:
    with db.write() as session:
        session.execute(update(File).where(File.id == file_id).values(expires_at=1.0))


def test_an_expired_file_goes_with_its_bytes(project_id: str, file_id: str) -> None:
    assert files.sweep_expired() == 0
    expire(file_id)
    assert files.sweep_expired() == 1
    assert storage.keys("files") == []


def test_an_expired_file_stays_readable_for_a_job_that_needs_it(project_id: str, file_id: str) -> None:
    job_id = factories.create_job(project_id, training_file=file_id)
    expire(file_id)
    assert files.sweep_expired() == 0
    with db.read() as connection:
        assert files.file_of_job(connection, project_id, file_id).storage_key == f"files/{file_id}"
        with pytest.raises(NotFound):
            files.get_file(connection, project_id, file_id)
    factories.update_job(job_id, status="succeeded")
    assert files.sweep_expired() == 1
