"""/v1/webhook_endpoints and /v1/webhook_event_types"""

from typing import Annotated

from fastapi import APIRouter, Query

from app.auth import KeyedRoute, ProjectId
from app.dependencies import Read, Write
from app.schemas import After, ListOut
from app.webhooks import delivery, service
from app.webhooks.schemas import (
    DeliveryOut,
    EndpointCreate,
    EndpointDeleted,
    EndpointOut,
    EndpointTest,
    EndpointTested,
    EndpointUpdate,
    EventTypesOut,
    NewEndpointOut,
    SecretRotate,
)

router = APIRouter(prefix="/v1", tags=["Webhooks"], route_class=KeyedRoute)
ENDPOINT = "/webhook_endpoints/{webhook_endpoint_id}"
Limit = Annotated[int, Query(ge=1, le=100)]


@router.get("/webhook_event_types", summary="List what can be sent")
def list_webhook_event_types(_project_id: ProjectId) -> EventTypesOut:
    return EventTypesOut(data=list(service.EVENT_TYPES))


@router.post("/webhook_endpoints", summary="Create a webhook endpoint")
def create_webhook_endpoint(body: EndpointCreate, project_id: ProjectId) -> NewEndpointOut:
    """The answer holds the signing secret; only a rotation shows another one."""
    return NewEndpointOut.of_new(service.create_endpoint(project_id, body.name, body.url, body.event_types))


@router.get("/webhook_endpoints", summary="List webhook endpoints")
def list_webhook_endpoints(
    project_id: ProjectId, connection: Read, after: After = None, limit: Limit = 20
) -> ListOut[EndpointOut]:
    rows, has_more = service.list_endpoints(connection, project_id, after=after, limit=limit)
    return ListOut[EndpointOut].of([EndpointOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.get(ENDPOINT, summary="Retrieve a webhook endpoint")
def retrieve_webhook_endpoint(webhook_endpoint_id: str, project_id: ProjectId, connection: Read) -> EndpointOut:
    return EndpointOut.of(service.get_endpoint(connection, project_id, webhook_endpoint_id))


@router.post(ENDPOINT, summary="Change a webhook endpoint")
def update_webhook_endpoint(webhook_endpoint_id: str, body: EndpointUpdate, project_id: ProjectId) -> EndpointOut:
    changes = body.model_dump(exclude_none=True)
    return EndpointOut.of(service.update_endpoint(project_id, webhook_endpoint_id, changes))


@router.delete(ENDPOINT, summary="Delete a webhook endpoint")
def delete_webhook_endpoint(webhook_endpoint_id: str, project_id: ProjectId, session: Write) -> EndpointDeleted:
    """What it was not told yet it will not be told."""
    service.delete_endpoint(session, project_id, webhook_endpoint_id)
    return EndpointDeleted(id=webhook_endpoint_id)


@router.post(f"{ENDPOINT}/rotate_secret", summary="Replace a signing secret")
def rotate_webhook_secret(
    webhook_endpoint_id: str, project_id: ProjectId, session: Write, body: SecretRotate | None = None
) -> NewEndpointOut:
    keep_old = bool(body and body.keep_old_secret_active_for_24_hours)
    return NewEndpointOut.of_new(service.rotate_secret(session, project_id, webhook_endpoint_id, keep_old=keep_old))


@router.post(f"{ENDPOINT}/test", summary="Send a sample event")
def test_webhook_endpoint(webhook_endpoint_id: str, body: EndpointTest, project_id: ProjectId) -> EndpointTested:
    """At once and once, about a job that does not exist; it is not among the deliveries."""
    status_code = delivery.send_sample(project_id, webhook_endpoint_id, body.event_type)
    return EndpointTested(event_type=body.event_type, status_code=status_code, webhook_endpoint_id=webhook_endpoint_id)


@router.get(f"{ENDPOINT}/deliveries", summary="List what was and will be sent")
def list_webhook_deliveries(
    webhook_endpoint_id: str, project_id: ProjectId, connection: Read, after: After = None, limit: Limit = 20
) -> ListOut[DeliveryOut]:
    rows, has_more = service.list_deliveries(connection, project_id, webhook_endpoint_id, after=after, limit=limit)
    return ListOut[DeliveryOut].of([DeliveryOut.of(row) for row in rows], [row.id for row in rows], has_more=has_more)


@router.post(f"{ENDPOINT}/deliveries/{{delivery_id}}/replay", summary="Send an event again")
def replay_webhook_delivery(webhook_endpoint_id: str, delivery_id: str, project_id: ProjectId, session: Write) -> DeliveryOut:
    """The same event under the same `webhook-id`, retried for another day."""
    return DeliveryOut.of(service.replay(session, project_id, webhook_endpoint_id, delivery_id))
