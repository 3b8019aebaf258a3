"""The Celery app, and messages that leave only after the transaction that asks for them has committed.

A message is a wake-up: it may be lost or doubled. Rows say what is to do, and the tick finds whatever a lost message left.
"""

import logging
from typing import Any

from celery import Celery
from sqlalchemy import event
from sqlalchemy.orm import Session

from app.config import get_settings

log = logging.getLogger(__name__)

CONTROL = "control"
ANY_NODE = "nodes"
"""The queue that every node's worker reads beside its own."""
TICK_S = 2.0

# A publisher must fail fast when the broker is down: redis-py's own retries block 6 s a call (docs/design.md).
_PUBLISH_OPTIONS = {"socket_connect_timeout": 0.5, "socket_timeout": 1.0, "retry_on_timeout": False, "max_retries": 0}
_OUTBOX = "tuneyard_outbox"

celery = Celery("tuneyard", broker=get_settings().resolved_broker_url)
celery.conf.update(
    task_ignore_result=True,
    task_acks_late=False,
    task_default_queue=CONTROL,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)


def node_queue(node_id: str) -> str:
    """The queue that only this node's worker reads."""
    return f"node.{node_id}"


def send_after_commit(session: Session, task: str, *args: Any, queue: str = CONTROL) -> None:
    """Ask for a message once `session` has committed; a rollback drops it."""
    session.info.setdefault(_OUTBOX, []).append((task, args, queue))


@event.listens_for(Session, "after_commit")
def _publish(session: Session) -> None:
    if session.in_nested_transaction():  # a savepoint: nobody sees its rows yet
        return
    messages = session.info.pop(_OUTBOX, [])
    if not messages:
        return
    try:
        with celery.connection_for_write(transport_options=_PUBLISH_OPTIONS) as connection:
            for task, args, queue in messages:
                # These are worth nothing once a tick has passed: a burst must leave no backlog.
                expires = None if task == "launch" else TICK_S
                celery.send_task(task, args=args, queue=queue, connection=connection, retry=False, expires=expires)
    except Exception as error:  # any broker failure: the row is committed, the tick will find it
        log.warning("the broker took no message; the tick finds the work of %d wake-up(s): %s", len(messages), error)


@event.listens_for(Session, "after_rollback")
def _drop(session: Session) -> None:
    session.info.pop(_OUTBOX, None)
