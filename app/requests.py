"""The outermost layer of every request: its id, its log line, and the answer when something unforeseen breaks."""

import time

import structlog
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.ids import new_id

log = structlog.get_logger()


class RequestIds:
    """Pure ASGI, so that streams pass through untouched. Gives every response `x-request-id`, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id, started, status = new_id("req_"), time.monotonic(), 0
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            except Exception:
                log.exception("request failed", method=scope["method"], path=scope["path"])
                if status:  # the response has begun: breaking the connection is all that is left to say
                    raise
                await _internal_error(request_id)(scope, receive, send_with_id)
            milliseconds = round((time.monotonic() - started) * 1000, 1)
            log.info("request", method=scope["method"], path=scope["path"], status=status, milliseconds=milliseconds)


def _internal_error(request_id: str) -> JSONResponse:
    message = f"Something broke in the service. Its log has the cause under the request id {request_id}."
    error = {"message": message, "type": "server_error", "param": None, "code": "internal_error"}
    return JSONResponse({"error": error}, status_code=500)
