"""Webhooks leave from here: threads of the control worker that send what is due."""

import logging
import threading

from app.webhooks import delivery

log = logging.getLogger(__name__)

SENDERS = 4  # endpoints that can be called at once; one that is slow holds up one of them
POLL_S = 1.0


def start() -> None:
    """Send from threads of this process for as long as it lives."""
    for number in range(SENDERS):
        threading.Thread(target=send_until, args=(threading.Event(),), name=f"messenger-{number}", daemon=True).start()


def send_until(stop: threading.Event) -> None:
    """Send what is due until asked to stop."""
    while not stop.is_set():
        try:
            has_sent = delivery.deliver_next()
        except Exception:  # the database is away: what was not noted is sent again
            log.warning("webhooks wait; trying again", exc_info=True)
            has_sent = False
        if not has_sent:
            stop.wait(POLL_S)
