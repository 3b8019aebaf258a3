"""Who is calling, and how much may they send: both are settled before a byte of the body is stored.

`Authorization: Bearer <key>` names the project whose objects a request sees.
"""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from app import db
from app.config import get_settings
from app.errors import Forbidden, Unauthenticated
from app.keys import service

_bearer = HTTPBearer(auto_error=False, description="An API key of this service.")


MAX_BODY_BYTES = 8 * 1024**2  # of anything but an upload: a spec with its longest chat template and prompts fits well


class KeyedRoute(APIRoute):
    """A route for callers with a key. FastAPI reads bodies before dependencies run, so the key is not one of them."""

    @property
    def max_body_bytes(self) -> int:
        return MAX_BODY_BYTES

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_key(request: Request) -> Response:
            request.state.project_id = await run_in_threadpool(_authenticate, request.headers)
            return await handle(Request(request.scope, _limited(request, self.max_body_bytes)))

        return handle_with_key


class AdminRoute(KeyedRoute):
    """A route for the service's operators: 403 for any other key."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_as_admin(request: Request) -> Response:
            await run_in_threadpool(_require_admin, request.headers)
            return await handle(request)

        return handle_as_admin


async def _project_id(request: Request, _documented: Annotated[object, Depends(_bearer)]) -> str:
    project_id: str = request.state.project_id
    return project_id


ProjectId = Annotated[str, Depends(_project_id)]


def _limited(request: Request, limit: int) -> Receive:
    """The request's body, cut off with 413 where it passes the limit: at once if it says its length."""
    length, received = request.headers.get("content-length", ""), 0
    announced = int(length) if length.isdecimal() else 0

    async def receive() -> Message:
        nonlocal received
        message = await request.receive() if announced <= limit else {}
        received += len(message.get("body", b""))
        if max(announced, received) > limit:
            # Not one of our errors: FastAPI lets only this class through from where it reads a body.
            raise HTTPException(413, f"The body is larger than {limit} bytes.")
        return message

    return receive


def _key(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("No API key: send the header `Authorization: Bearer <key>`.", code="missing_api_key")
    return key.strip()


def _require_admin(headers: Headers) -> None:
    _authenticate(headers)
    with db.read() as connection:
        if not service.is_admin(connection, _key(headers)):
            raise Forbidden("This needs an admin key: the one the service made at its first start is one.", code="admin_only")


def _authenticate(headers: Headers) -> str:
    with db.read() as connection:
        project_id = service.authenticate(connection, _key(headers))
    if project_id is None:
        raise Unauthenticated("This API key is not known here, or was revoked.", code="invalid_api_key")
    _refuse_foreign(headers, project_id)
    return project_id


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
