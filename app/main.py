"""The HTTP API, put together."""

import errno
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from sqlalchemy.exc import DataError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from app import db, health, log, validation
from app.audit import routes as audit
from app.errors import DiskFull, InvalidRequest, TuneyardError, Unavailable
from app.files import routes as files
from app.jobs import routes as jobs
from app.keys import routes as projects
from app.manifests import routes as manifests
from app.models import routes as models
from app.nodes import routes as nodes
from app.previews import routes as previews
from app.recipes import routes as recipes
from app.requests import RequestIds
from app.secrets import routes as secrets
from app.webhooks import routes as webhooks

DESCRIPTION = """
OpenAI's fine-tuning API on your own machines and open weights: point the official `openai` SDK at `/v1`.
Fields that OpenAI does not have stand beside its own; a job's are in `spec`.
"""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": validation.ErrorEnvelope, "description": "The request is refused; `error.message` says what to change."},
    "5XX": {"model": validation.ErrorEnvelope, "description": "The service failed; the same call may succeed later."},
}
ERROR_CODES = {404: "unknown_route", 405: "method_not_allowed", 413: "body_too_large"}


def create_app() -> FastAPI:
    """The application, complete and without side effects: nothing is connected before the first request."""
    log.configure()
    app = FastAPI(
        title="Tuneyard",
        version="0.1.0",
        description=DESCRIPTION,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
    )
    for router in (
        files.router,
        previews.router,
        jobs.streams,
        jobs.router,
        models.router,
        manifests.router,
        secrets.router,
        webhooks.router,
        nodes.router,
        nodes.operations,
        projects.router,
        audit.router,
        recipes.router,
        health.router,
    ):
        app.include_router(router, responses=ERROR_RESPONSES)
    app.add_exception_handler(TuneyardError, _tuneyard_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for unreachable in db.AWAY:
        app.add_exception_handler(unreachable, _database_unreachable)
    app.add_exception_handler(OSError, _system_error)
    app.add_exception_handler(DataError, _unstorable)
    app.add_middleware(RequestIds)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name


def _tuneyard_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TuneyardError)
    return JSONResponse(error.envelope(), error.status, error.headers)


def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    status, body = validation.envelope(error, request.scope.get("route"))
    return JSONResponse(body, status)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    """What the framework refuses itself: unknown routes, wrong methods, bodies too large or not readable."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = {
        404: f"There is no {request.url.path} here.",
        405: f"{request.method} is not possible at {request.url.path}.",
    }.get(status, str(error.detail))
    content = {
        "message": message,
        "type": ERROR_TYPES.get(status, "invalid_request_error"),
        "param": None,
        "code": ERROR_CODES.get(status),
    }
    return JSONResponse({"error": content}, status, error.headers)


def _database_unreachable(request: Request, error: Exception) -> JSONResponse:
    if "disk is full" in str(error):  # SQLite's word for it
        return _tuneyard_error(request, DiskFull())
    return _tuneyard_error(request, Unavailable("The database cannot be reached now: try again.", code="database_unavailable"))


def _system_error(request: Request, error: Exception) -> JSONResponse:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return _tuneyard_error(request, DiskFull())
    raise error


def _unstorable(request: Request, _error: Exception) -> JSONResponse:
    message = "The request holds a value that cannot be stored, such as a NUL character or a number out of range."
    return _tuneyard_error(request, InvalidRequest(message, code="unstorable_value"))
