"""Webhooks on the wire: OpenAI's endpoints, and our record of deliveries."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator
from sqlalchemy import Row

from app.schemas import RequestModel
from app.webhooks.service import EVENT_TYPES, NewSecret
from app.webhooks.tables import Delivery, Endpoint

NAME = r"^[^\x00-\x1f\x7f]*[^\x00-\x20\x7f][^\x00-\x1f\x7f]*$"
EventType = Annotated[str, Field(json_schema_extra={"enum": list(EVENT_TYPES)})]


def _known(event_type: str) -> str:
    if event_type not in EVENT_TYPES:
        raise ValueError(f"`{event_type}` is no event here; there are {', '.join(EVENT_TYPES)}")
    return event_type


class EndpointUpdate(RequestModel):
    """What changes; the rest stays."""

    name: str | None = Field(default=None, pattern=NAME, max_length=128, description="For people.")
    url: str | None = Field(default=None, max_length=2048, description="Where events are sent by POST.")
    event_types: Annotated[list[EventType], Field(min_length=1, max_length=50)] | None = Field(
        default=None, description="What is sent, as `GET /v1/webhook_event_types` lists it."
    )

    @field_validator("event_types")
    @classmethod
    def _all_known(cls, event_types: list[str] | None) -> list[str] | None:
        return event_types and list(dict.fromkeys(map(_known, event_types)))


class EndpointCreate(EndpointUpdate):
    """A new endpoint."""

    name: str = Field(pattern=NAME, max_length=128, description="For people.")
    url: str = Field(max_length=2048, description="Where events are sent by POST.")
    event_types: Annotated[list[EventType], Field(min_length=1, max_length=50)] = Field(
        description="What is sent, as `GET /v1/webhook_event_types` lists it."
    )


class SecretRotate(RequestModel):
    """How a signing secret is replaced."""

    keep_old_secret_active_for_24_hours: bool | None = Field(default=None, description="Sign with both until then.")


class EndpointTest(RequestModel):
    """What to try."""

    event_type: EventType

    @field_validator("event_type")
    @classmethod
    def _is_known(cls, event_type: str) -> str:
        return _known(event_type)


class EndpointOut(BaseModel):
    """An endpoint; never its secret."""

    id: str
    object: Literal["webhook_endpoint"] = "webhook_endpoint"
    created_at: int
    updated_at: int
    event_types: list[str]
    name: str
    url: str
    signing_secret_hint: str

    @classmethod
    def of(cls, endpoint: Endpoint | Row[Any], **more: Any) -> Self:
        times = {name: int(getattr(endpoint, name)) for name in ("created_at", "updated_at")}
        shown = {name: getattr(endpoint, name) for name in ("id", "event_types", "name", "url")}
        return cls(**shown, **times, **more, signing_secret_hint=endpoint.hint)


class NewEndpointOut(EndpointOut):
    """An endpoint at its creation, and with a new secret."""

    signing_secret: str = Field(description="Give it to `client.webhooks.unwrap`. Shown this once.")

    @classmethod
    def of_new(cls, new: NewSecret) -> Self:
        return cls.of(new.endpoint, signing_secret=new.plaintext)


class EndpointDeleted(BaseModel):
    """Proof that an endpoint is gone."""

    id: str
    object: Literal["webhook_endpoint.deleted"] = "webhook_endpoint.deleted"
    deleted: bool = True


class EndpointTested(BaseModel):
    """What an endpoint answered."""

    object: Literal["webhook_endpoint.test"] = "webhook_endpoint.test"
    event_type: str
    status_code: int
    success: Literal[True] = True
    webhook_endpoint_id: str


class EventTypesOut(BaseModel):
    """Everything that can be sent."""

    object: Literal["list"] = "list"
    data: list[str]


class DeliveryOut(BaseModel):
    """An event for an endpoint, and how its last try ended."""

    id: str
    object: Literal["webhook_delivery"] = "webhook_delivery"
    event_id: str = Field(description="The header `webhook-id`: the same at each try.")
    event_type: str
    status: str = Field(description="`pending`, `delivered` or `failed`.")
    tries: int
    status_code: int | None
    error: str | None
    payload: str = Field(description="The body that is sent.")
    created_at: int
    next_try_at: int | None
    ended_at: int | None

    @classmethod
    def of(cls, delivery: Delivery | Row[Any]) -> Self:
        names = ("id", "event_id", "event_type", "status", "tries", "status_code", "error")
        return cls(
            **{name: getattr(delivery, name) for name in names},
            payload=delivery.body,
            created_at=int(delivery.created_at),
            next_try_at=int(delivery.due_at) if delivery.status == "pending" else None,
            ended_at=None if delivery.ended_at is None else int(delivery.ended_at),
        )
