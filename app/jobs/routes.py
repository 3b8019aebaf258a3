"""/v1/fine_tuning/jobs"""

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent

from app import db, downloads, storage
from app.auth import KeyedRoute, KeyId, ProjectId
from app.dependencies import Read, Write
from app.errors import InvalidRequest
from app.jobs import history, live, logs, queries, replays, reruns, service
from app.jobs.schemas import ArtifactOut, AttemptOut, CheckpointOut, EventOut, JobCreate, JobOut, MetricsOut
from app.schemas import After, ListOut

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["Fine-tuning"], route_class=KeyedRoute)
streams = APIRouter(prefix="/v1/fine_tuning/jobs", route_class=live.EventStreamRoute, include_in_schema=False)

EVENT_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
Tail = Annotated[int, Query(ge=0, le=100_000, description="How many of the last lines.")]
LastSeq = Annotated[int, Header(alias="Last-Event-ID", ge=0, le=2**31 - 1)]


def _own_job(job_id: str, project_id: ProjectId, connection: Read) -> str:
    queries.require_job(connection, project_id, job_id)
    return job_id


OwnJob = Annotated[str, Depends(_own_job)]
"""The id of a job of the caller's project; any other is 404 before anything else happens."""


def _log_position(last_event_id: Annotated[str | None, Header(max_length=64)] = None) -> logs.Position | None:
    return None if last_event_id is None else logs.Position.parse(last_event_id)


ResumeAt = Annotated[logs.Position | None, Depends(_log_position)]


@router.post("", summary="Create a job")
def create_job(
    body: JobCreate,
    project_id: ProjectId,
    key_id: KeyId,
    session: Write,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
    x_stainless_retry_count: Annotated[int, Header(ge=0, le=1000, description="The SDK's own.")] = 0,
) -> JobOut:
    """With an `Idempotency-Key` the same request, sent again, answers with the job that is there, and with
    `Idempotency-Replayed: true`. So do the SDK's own repetitions."""
    request = replays.Request.of(project_id, key_id, idempotency_key, x_stainless_retry_count, body)
    job, replayed = replays.once(session, request, partial(service.create_job, session, project_id, body))
    if replayed:
        response.headers["Idempotency-Replayed"] = "true"
    return JobOut.of(job)


@router.get("", summary="List jobs")
def list_jobs(
    request: Request,
    project_id: ProjectId,
    connection: Read,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> ListOut[JobOut]:
    """Newest first. `metadata[key]=value` keeps jobs with that pair, `metadata=null` those without any."""
    rows, has_more = queries.list_jobs(connection, project_id, _metadata(request), after=after, limit=limit)
    return ListOut[JobOut].of([JobOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.get("/{job_id}", summary="Retrieve a job", response_model=JobOut, responses={304: {"description": "Not changed."}})
def retrieve_job(job_id: str, project_id: ProjectId, connection: Read, request: Request) -> Response:
    """Answers 304 to `If-None-Match` while nothing has changed."""
    return downloads.json_with_etag(request, JobOut.of(queries.get_job(connection, project_id, job_id)))


@router.post("/{job_id}/cancel", summary="Cancel a job")
def cancel_job(job_id: str, project_id: ProjectId) -> JobOut:
    """A queued job is cancelled at once; a running one saves and stops, and says `cancelling` until it has."""
    service.cancel_job(project_id, job_id)
    with db.read() as connection:  # only now: nothing is held while the job stops
        return JobOut.of(queries.get_job(connection, project_id, job_id))


@router.post("/{job_id}/pause", summary="Pause a job")
def pause_job(job_id: str, project_id: ProjectId) -> JobOut:
    """A queued job is held back at once; a running one saves and stops, and says `pausing` until it has."""
    service.pause_job(project_id, job_id)
    with db.read() as connection:
        return JobOut.of(queries.get_job(connection, project_id, job_id))


@router.post("/{job_id}/resume", summary="Resume a paused or failed job")
def resume_job(job_id: str, project_id: ProjectId) -> JobOut:
    """The job is queued again and goes on from its last checkpoint. After a failure its tries and its time count anew."""
    service.resume_job(project_id, job_id)
    with db.read() as connection:
        return JobOut.of(queries.get_job(connection, project_id, job_id))


@router.post("/{job_id}/rerun", summary="Run an ended job again")
def rerun_job(job_id: str, project_id: ProjectId) -> JobOut:
    """A new job with the same spec, seed and rows: on the same hardware it gives the same losses."""
    new_id = reruns.rerun_job(project_id, job_id)
    with db.read() as connection:
        return JobOut.of(queries.get_job(connection, project_id, new_id))


@streams.get("/{job_id}/events", response_class=EventSourceResponse)
async def stream_job_events(job_id: OwnJob, last_seq: LastSeq = 0) -> AsyncIterator[ServerSentEvent]:
    async for event in live.follow_events(job_id, last_seq):
        yield event


@router.get("/{job_id}/events", summary="List or stream a job's events", responses=EVENT_STREAM)
def list_job_events(
    job_id: OwnJob, connection: Read, after: After = None, limit: Annotated[int, Query(ge=1, le=1000)] = 20
) -> ListOut[EventOut]:
    """Newest first. With `Accept: text/event-stream` they come oldest first and live until the job has ended: the id of
    an event is its `seq`, and `Last-Event-ID` resumes after it."""
    rows, has_more = queries.list_events(connection, job_id, after=after, limit=limit)
    return ListOut[EventOut].of([EventOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.get("/{job_id}/checkpoints", summary="List a job's checkpoints")
def list_job_checkpoints(
    job_id: OwnJob, connection: Read, after: After = None, limit: Annotated[int, Query(ge=1, le=1000)] = 10
) -> ListOut[CheckpointOut]:
    rows, has_more = queries.list_checkpoints(connection, job_id, after=after, limit=limit)
    return ListOut[CheckpointOut].of([CheckpointOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.get("/{job_id}/attempts", summary="List every try at running a job")
def list_job_attempts(job_id: OwnJob, connection: Read) -> ListOut[AttemptOut]:
    """Oldest first: where each ran and when, its first and last step, how and why it ended."""
    attempts = history.of_job(connection, job_id)
    return ListOut[AttemptOut].of(
        [AttemptOut.of(attempt) for attempt in attempts], [str(attempt["attempt"]) for attempt in attempts]
    )


@router.get("/{job_id}/metrics", summary="A job's figures for a chart")
def retrieve_job_metrics(
    job_id: OwnJob,
    connection: Read,
    since_step: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    max_points: Annotated[int, Query(ge=2, le=10_000, description="More are thinned out evenly.")] = 1000,
) -> MetricsOut:
    count, columns = queries.metrics(connection, job_id, since_step=since_step, max_points=max_points)
    return MetricsOut(total_points=count, columns=columns)


@router.get("/{job_id}/artifacts", summary="List the files of a job's result")
def list_job_artifacts(job_id: OwnJob, connection: Read) -> ListOut[ArtifactOut]:
    rows = queries.list_artifacts(connection, job_id)
    return ListOut[ArtifactOut].of(
        [ArtifactOut.of(row, storage.uri(row.storage_key)) for row in rows], [row.name for row in rows]
    )


@router.get("/{job_id}/artifacts/{name:path}/content", summary="Download a file of a job's result", response_class=Response)
@router.head("/{job_id}/artifacts/{name:path}/content", include_in_schema=False)
def retrieve_job_artifact_content(job_id: OwnJob, name: str, connection: Read, request: Request) -> Response:
    artifact = queries.get_artifact(connection, job_id, name)
    filename = name.rpartition("/")[2]
    return downloads.send(request, downloads.StoredObject(artifact.storage_key, artifact.bytes, artifact.sha256, filename))


@streams.get("/{job_id}/logs", response_class=EventSourceResponse)
async def stream_job_log(job_id: OwnJob, resume_at: ResumeAt, tail: Tail = 200) -> AsyncIterator[ServerSentEvent]:
    async for position, text in live.follow_log(job_id, tail, resume_at):
        yield ServerSentEvent(id=str(position), event="log", raw_data=text.removesuffix("\n"))


@router.get(
    "/{job_id}/logs", summary="Read or follow the trainer's log", response_class=PlainTextResponse, responses=EVENT_STREAM
)
def retrieve_job_log(
    job_id: OwnJob,
    connection: Read,
    tail: Tail = 200,
    follow: Annotated[bool, Query(description="Go on as the log grows, until the job has ended.")] = False,
) -> Response:
    """The log of the newest attempt. With `Accept: text/event-stream` it comes as events and `Last-Event-ID` resumes."""
    if follow:
        return StreamingResponse(live.follow_log_text(job_id, tail), media_type="text/plain; charset=utf-8")
    attempt, _ = queries.standing(connection, job_id)
    return PlainTextResponse(logs.tail(job_id, attempt, tail)[1])


def _metadata(request: Request) -> dict[str, str] | None:
    """`?metadata[team]=x` is how the SDK sends a mapping; `?metadata=null` asks for jobs that have none."""
    if request.query_params.get("metadata") == "null":
        return {}
    pairs = {
        key[9:-1]: value for key, value in request.query_params.items() if key.startswith("metadata[") and key.endswith("]")
    }
    if any("\x00" in text for pair in pairs.items() for text in pair):
        raise InvalidRequest("Metadata holds no NUL character.", code="invalid_value", param="metadata")
    return pairs or None
