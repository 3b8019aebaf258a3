"""Is the process up, and can it do its work?"""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from app import db
from app.config import get_settings
from app.errors import Unavailable

router = APIRouter(tags=["Health"])


class Health(BaseModel):
    """All is well."""

    status: Literal["ok"] = "ok"


@router.get("/healthz", summary="Is the process up")
def healthz() -> Health:
    return Health()


@router.get("/readyz", summary="Do database and broker answer", responses={503: {"description": "One of them does not."}})
def readyz() -> Health:
    unreachable = [name for name, answers in (("database", _database_answers()), ("broker", _broker_answers())) if not answers]
    if unreachable:
        raise Unavailable(f"Not reachable: {', '.join(unreachable)}.", code="not_ready")
    return Health()


def _database_answers() -> bool:
    try:
        with db.read() as connection:
            connection.execute(select(1))
            return True
    except SQLAlchemyError:
        return False


def _broker_answers() -> bool:
    # The client's own retries take seconds; the caller of a readiness check comes back anyway.
    client = Redis.from_url(
        get_settings().broker_as_redis, socket_connect_timeout=0.5, socket_timeout=1, retry=Retry(NoBackoff(), 0)
    )
    try:
        return bool(client.ping())
    except (RedisError, OSError):
        return False
    finally:
        client.close()
