"""What changes about a job reaches the endpoints that asked for it, signed, at least once, for a day."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from sqlalchemy import select, update

from app import db, outbound
from app.config import get_settings
from app.jobs import service as jobs
from app.keys import service as keys
from app.webhooks import delivery, service
from app.webhooks.tables import Delivery
from tests import factories
from tests.service import wait_until
from tests.webhooks.receiver import Receiver, receiving
from worker import messenger

CANCELLED = "fine_tuning.job.cancelled"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
def project_id(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A project of a service whose operator lists the loopback address."""
    monkeypatch.setenv("TUNEYARD_OUTBOUND_ALLOWED_HOSTS", '["127.0.0.0/8"]')
    get_settings.cache_clear()
    with db.write() as session:
        return keys.create_project(session, "a").id


def subscribe(project_id: str, receiver: Receiver, *event_types: str) -> service.NewSecret:
    return service.create_endpoint(project_id, "hook", receiver.url, event_types or (CANCELLED,))


def cancel_a_job(project_id: str) -> str:
    job_id = factories.create_job(project_id)
    jobs.cancel_job(project_id, job_id)
    return job_id


def deliver_all() -> None:
    while delivery.deliver_next():
        pass


def make_due(seconds: float = 0.0) -> None:
    """Every pause and every claim is over, and so much of the day too."""
    with db.write() as session:
        values = {"due_at": Delivery.due_at - 1e4, "give_up_at": Delivery.give_up_at - seconds}
        session.execute(update(Delivery).values(**values))


def stored() -> Any:
    with db.read() as connection:
        return connection.execute(select(Delivery.__table__)).one()


def unwrap(receiver: Receiver, secret: str) -> Any:
    headers, body = receiver.got[-1]
    return OpenAI(api_key="none").webhooks.unwrap(body, headers, secret=secret)


def test_the_sdk_unwraps_what_a_cancelled_job_sends(project_id: str, receiver: Receiver) -> None:
    secret = subscribe(project_id, receiver).plaintext
    job_id = cancel_a_job(project_id)
    deliver_all()
    event = unwrap(receiver, secret)
    assert (event.type, event.data.id, event.object) == (CANCELLED, job_id, "event")
    assert receiver.ids == [event.id]
    assert (stored().status, stored().tries, stored().status_code) == ("delivered", 1, 200)
    with pytest.raises(InvalidWebhookSignatureError):
        unwrap(receiver, "whsec_" + "A" * 44)


def test_an_endpoint_hears_only_what_it_asked_for_of_its_own_project(project_id: str, receiver: Receiver) -> None:
    with db.write() as session:
        other = keys.create_project(session, "other").id
    subscribe(other, receiver, *service.EVENT_TYPES)
    subscribe(project_id, receiver, "fine_tuning.job.paused")
    cancel_a_job(project_id)
    jobs.pause_job(project_id, factories.create_job(project_id))
    deliver_all()
    assert [json.loads(body)["type"] for _, body in receiver.got] == ["fine_tuning.job.paused"]


def test_a_change_that_is_rolled_back_tells_nobody(project_id: str, receiver: Receiver) -> None:
    subscribe(project_id, receiver)
    with db.write() as session:
        service.announce(session, project_id, CANCELLED, {"id": "ftjob-x"})
        session.rollback()
    deliver_all()
    assert receiver.got == []


def test_a_refused_event_is_sent_again_under_its_id_until_it_is_taken(project_id: str, receiver: Receiver) -> None:
    subscribe(project_id, receiver)
    receiver.answers = [500, 302, 429]
    cancel_a_job(project_id)
    errors = []
    for _ in range(4):
        deliver_all()
        errors.append(stored().error)
        make_due()
    assert errors == ["HTTP 500", "redirects are not followed", "HTTP 429", None]
    assert (stored().status, stored().tries) == ("delivered", 4)
    assert len(receiver.got) == 4
    assert len(set(receiver.ids)) == 1


def test_the_pauses_grow_and_after_a_day_it_is_given_up_and_can_be_replayed(project_id: str, receiver: Receiver) -> None:
    endpoint = subscribe(project_id, receiver).endpoint
    receiver.answers = [500] * 4
    cancel_a_job(project_id)
    pauses = []
    for _ in range(3):
        deliver_all()
        with db.read() as connection:
            pauses.append(connection.execute(select(Delivery.due_at - db.now())).scalar_one())
        make_due()
    assert pauses == pytest.approx([5, 10, 20], abs=4)
    make_due(service.DAY_S)
    deliver_all()
    assert stored().status == "failed"
    make_due()
    assert not delivery.deliver_next()
    with db.write() as session:
        service.replay(session, project_id, endpoint.id, stored().id)
    deliver_all()
    assert stored().status == "delivered"
    assert len(set(receiver.ids)) == 1


def test_an_event_whose_sender_was_killed_goes_out_again(project_id: str, receiver: Receiver) -> None:
    secret = subscribe(project_id, receiver).plaintext
    cancel_a_job(project_id)
    receiver.hold.clear()
    sender = subprocess.Popen([sys.executable, "-c", "from app.webhooks import delivery; delivery.deliver_next()"])
    wait_until(lambda: len(receiver.got) == 1, "the event arrives")
    sender.kill()
    sender.wait()
    receiver.hold.set()
    assert not delivery.deliver_next()  # its claim still holds
    make_due()
    deliver_all()
    assert len(receiver.ids) == 2
    assert len(set(receiver.ids)) == 1
    assert unwrap(receiver, secret).type == CANCELLED
    assert (stored().status, stored().tries) == ("delivered", 2)


def test_what_a_sender_notes_late_does_not_undo_what_another_has_noted(project_id: str, receiver: Receiver) -> None:
    subscribe(project_id, receiver)
    cancel_a_job(project_id)
    slow = delivery._claim()
    assert slow is not None
    make_due()
    deliver_all()
    delivery._note(slow, delivery.Outcome(None, "no answer"))
    assert (stored().status, stored().error) == ("delivered", None)


def test_a_slow_endpoint_takes_one_sender_and_others_hear_meanwhile(project_id: str, receiver: Receiver) -> None:
    with receiving() as slow:
        slow.hold.clear()
        subscribe(project_id, slow)
        for _ in range(3):
            cancel_a_job(project_id)
        first = threading.Thread(target=delivery.deliver_next)
        first.start()
        wait_until(lambda: len(slow.got) == 1, "the slow one is called")
        subscribe(project_id, receiver)
        job_id = cancel_a_job(project_id)
        deliver_all()
        assert [json.loads(body)["data"]["id"] for _, body in receiver.got] == [job_id]
        assert len(slow.got) == 1
        slow.hold.set()
        first.join()
        deliver_all()
        assert len(slow.got) == 4


def test_after_a_rotation_the_old_secret_still_verifies_if_asked(project_id: str, receiver: Receiver) -> None:
    new = subscribe(project_id, receiver)
    secrets = [new.plaintext]
    for keep_old in (True, False):
        with db.write() as session:
            secrets.append(service.rotate_secret(session, project_id, new.endpoint.id, keep_old=keep_old).plaintext)
        cancel_a_job(project_id)
        deliver_all()
        assert unwrap(receiver, secrets[-1]).type == CANCELLED
        if keep_old:
            assert unwrap(receiver, secrets[0]).type == CANCELLED
        else:
            with pytest.raises(InvalidWebhookSignatureError):
                unwrap(receiver, secrets[1])


def test_a_name_that_turns_to_a_private_address_is_not_connected_to(
    project_id: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscribe(project_id, receiver)
    cancel_a_job(project_id)
    monkeypatch.setenv("TUNEYARD_OUTBOUND_ALLOWED_HOSTS", "[]")
    get_settings.cache_clear()
    deliver_all()
    assert receiver.got == []
    assert (stored().status, stored().status_code) == ("pending", None)
    assert stored().error


def test_a_server_that_never_ends_its_answer_is_cut_off(
    project_id: str, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbound, "DEADLINE_S", 0.3)
    receiver.hold.clear()
    with pytest.raises(outbound.NoAnswer):
        outbound.post(receiver.url, b"{}", {})


def test_old_deliveries_are_swept_and_waiting_ones_stay(project_id: str, receiver: Receiver) -> None:
    subscribe(project_id, receiver)
    cancel_a_job(project_id)
    service.sweep(0.0)
    deliver_all()
    assert stored().status == "delivered"
    service.sweep(1000.0)
    assert stored()
    service.sweep(0.0)
    with db.read() as connection:
        assert connection.execute(select(Delivery.id)).all() == []


def test_the_control_workers_threads_send_by_themselves(project_id: str, receiver: Receiver) -> None:
    stop = threading.Event()
    sender = threading.Thread(target=messenger.send_until, args=(stop,))
    sender.start()
    subscribe(project_id, receiver)
    cancel_a_job(project_id)
    wait_until(lambda: len(receiver.got) == 1, "the event arrives")
    stop.set()
    sender.join()


def test_a_sample_is_sent_at_once_and_says_what_was_answered(project_id: str, receiver: Receiver) -> None:
    new = subscribe(project_id, receiver)
    receiver.answers = [418]
    assert delivery.send_sample(project_id, new.endpoint.id, CANCELLED) == 418
    assert unwrap(receiver, new.plaintext).type == CANCELLED
