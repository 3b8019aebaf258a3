"""The one family of errors a caller can see, and their place in OpenAI's error envelope.

TuneyardError           400 invalid_request_error
|- InvalidRequest       400
|- Unauthenticated      401
|- Forbidden            403
|- NotFound             404
|- Conflict             409, never retried by the SDK
|- TooLarge             413
|- RateLimited          429, with Retry-After
|- QuotaExceeded        429, never retried by the SDK
|- Unavailable          503, with Retry-After
`- DiskFull             507, never retried by the SDK
"""

from typing import ClassVar


class TuneyardError(Exception):
    """An expected failure: `message` says what to do, `param` names the field by its dotted path, `code` is stable."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        """Headers the response carries beside the envelope."""
        return {}

    def envelope(self) -> dict[str, dict[str, str | None]]:
        """The body of the response: all four keys are always there."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(TuneyardError):
    """The request cannot be carried out as it stands."""


class Unauthenticated(TuneyardError):
    """No API key, or one that is not ours."""

    status = 401
    type = "authentication_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(TuneyardError):
    """The key is valid, but this is not allowed to it."""

    status = 403
    type = "permission_error"


class NotFound(TuneyardError):
    """No such object for this project."""

    status = 404
    type = "not_found_error"


class Conflict(TuneyardError):
    """The object's state does not allow this; the same call again would not either."""

    status = 409
    type = "conflict_error"

    @property
    def headers(self) -> dict[str, str]:
        # The SDK repeats a 409 twice unless told not to.
        return {"x-should-retry": "false"}


class TooLarge(TuneyardError):
    """More bytes than an operator allows."""

    status = 413


class QuotaExceeded(TuneyardError):
    """The project has used up what its operator gives it."""

    status = 429
    type = "insufficient_quota"

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class RateLimited(TuneyardError):
    """Too much at once for one key; the same call later will do."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int, more_headers: dict[str, str] | None = None) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after_s = retry_after_s
        self.more_headers = more_headers or {}

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self.retry_after_s), **self.more_headers}


class Unavailable(TuneyardError):
    """The service cannot answer now; the same call later will."""

    status = 503
    type = "server_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "2"}


class DiskFull(TuneyardError):
    """The service has no room for what it should keep; the same call works once an operator has made some."""

    status = 507
    type = "server_error"

    def __init__(self) -> None:
        super().__init__("The service's disk is full: its operator must free space.", code="disk_full")

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}
