"""Who is calling, and how much may they send: both are settled before a byte of the body is stored.

`Authorization: Bearer <key>` names the project whose objects a request sees.
"""

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, ClassVar

import anyio
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from app import db, limits
from app.audit import service as audit
from app.audit.tables import Entry
from app.config import get_settings
from app.errors import Forbidden, Unauthenticated
from app.keys import scopes, service
from app.keys.service import Caller

_bearer = HTTPBearer(auto_error=False, description="An API key of this service.")


Handler = Callable[[Request], Coroutine[Any, Any, Response]]
READING = ("GET", "HEAD")
IDLE_BODY_S = 60.0
MAX_BODY_BYTES = 8 * 1024**2  # of anything but an upload: a spec with its longest chat template and prompts fits well


class KeyedRoute(APIRoute):
    """A route for callers with a key that opens its area: reading needs `AREA:read`, all else `AREA:write`.

    FastAPI reads bodies before dependencies run, so the key is not one of them.
    """

    area: ClassVar[str] = "jobs"

    @property
    def max_body_bytes(self) -> int:
        return MAX_BODY_BYTES

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_with_key(request: Request) -> Response:
            caller = await run_in_threadpool(_authenticate, request)
            _require_scope(caller, scopes.needed(self.area, request.method))
            request.state.project_id, request.state.key_id = caller.project_id, caller.key_id
            headers = await run_in_threadpool(limits.count_request, caller.key_id)
            limited = Request(request.scope, _limited(request, self.max_body_bytes))
            if _asks_for_stream(request):
                return await _counted(handle, limited, caller.key_id)
            response = await handle(limited)
            response.headers.update(headers)
            return response if request.method in READING else _Recorded(response, self._entry(caller, request, response))

        return handle_with_key

    def _entry(self, caller: Caller, request: Request, response: Response) -> Entry:
        return Entry(
            type=audit.type_of(self.name),
            object_id=_object_id(self.name, request, response),
            project_id=caller.project_id,
            key_id=caller.key_id,
            request_id=request.state.request_id,
            ip_address=request.client.host if request.client else None,
            user_agent=request.headers.get("user-agent", "")[:256] or None,
        )


class _Recorded(Response):
    """A response that is sent once the audit log has the change. When it is called, the change has been committed."""

    def __init__(self, response: Response, entry: Entry) -> None:
        self.response, self.entry = response, entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_in_threadpool(audit.record, self.entry)
        await self.response(scope, receive, send)


async def _counted(handle: Handler, request: Request, key_id: str) -> Response:
    """A stream, counted among those that its key has open until it ends. Raises RateLimited for one too many."""
    limits.open_stream(key_id)
    try:
        return _Counted(await handle(request), key_id)
    except BaseException:
        limits.close_stream(key_id)
        raise


class _Counted(Response):
    """A stream that is counted until it ends."""

    def __init__(self, response: Response, key_id: str) -> None:
        self.response, self.key_id = response, key_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.response(scope, receive, send)
        finally:
            limits.close_stream(self.key_id)


class ModelRoute(KeyedRoute):
    """A route about models."""

    area = "models"


class AdminRoute(KeyedRoute):
    """A route for the service's operators."""

    area = scopes.ADMIN


async def _project_id(request: Request, _documented: Annotated[object, Depends(_bearer)]) -> str:
    project_id: str = request.state.project_id
    return project_id


async def _key_id(request: Request) -> str:
    key_id: str = request.state.key_id
    return key_id


ProjectId = Annotated[str, Depends(_project_id)]
KeyId = Annotated[str, Depends(_key_id)]
"""Which key of the project asks. A route that takes it takes the project, too."""


def _asks_for_stream(request: Request) -> bool:
    follows = "text/event-stream" in request.headers.get("accept", "") or "follow" in request.query_params
    return request.method == "GET" and follows


def _limited(request: Request, limit: int) -> Receive:
    """The request's body, cut off with 413 where it passes the limit: at once if it says its length; with 408 where it stops
    coming, as when a client has lost its power: nothing is kept for it."""
    is_whole = False
    length, received = request.headers.get("content-length", ""), 0
    announced = int(length) if length.isdecimal() else 0

    async def receive() -> Message:
        nonlocal received, is_whole
        message: Message = {}
        with anyio.move_on_after(None if is_whole else IDLE_BODY_S) as waiting:
            message = await request.receive() if announced <= limit else {}
        if waiting.cancelled_caught:
            raise HTTPException(408, f"No part of the body came for {IDLE_BODY_S:g} seconds.")
        is_whole = not message.get("more_body", False)
        received += len(message.get("body", b""))
        if max(announced, received) > limit:
            # Not one of our errors: FastAPI lets only this class through from where it reads a body.
            raise HTTPException(413, f"The body is larger than {limit} bytes.")
        return message

    return receive


def _authenticate(request: Request) -> Caller:
    if "api_key" in request.query_params:  # it stands in the logs of every proxy on its way
        message = "A key in a URL is read by others: revoke it, and send the header `Authorization: Bearer <key>`."
        raise Unauthenticated(message, code="api_key_in_url")
    with db.read() as connection:
        caller = service.authenticate(connection, _key(request.headers))
    _refuse_foreign(request.headers, caller.project_id)
    if caller.is_stale:
        service.note_use(caller.key_id)
    return caller


def _key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("No API key: send the header `Authorization: Bearer <key>`.", code="missing_api_key")
    return key.strip()


def _require_scope(caller: Caller, scope: str) -> None:
    if not scopes.allow(caller.scopes, scope):
        raise Forbidden(f"This API key lacks the scope `{scope}`: use one that has it.", code="missing_scope")


def _object_id(operation: str, request: Request, response: Response) -> str | None:
    """What is new, by its id in the answer; else what the path names last."""
    if operation.startswith(("create_", "rerun_")):
        made: dict[str, str] = json.loads(bytes(response.body))
        return made.get("id") or made.get("name")
    return str(list(request.path_params.values())[-1])[:512]


def _refuse_foreign(headers: Headers, project_id: str) -> None:
    """The SDK's optional headers must name what the key belongs to: answering for another project would mislead."""
    organization_id = get_settings().organization_id
    if headers.get("openai-organization") not in (None, "", organization_id):
        raise Unauthenticated(
            f"OpenAI-Organization is not this key's: send `{organization_id}` or leave the header out.",
            code="mismatched_organization",
        )
    if headers.get("openai-project") not in (None, "", project_id):
        raise Unauthenticated(
            f"OpenAI-Project is not this key's: send `{project_id}` or leave the header out.", code="mismatched_project"
        )
