"""What one key may ask for: requests a minute, over all API processes, and open streams in each of them.

The minute's count is in the broker. A broker that is away counts nothing and refuses nobody.
"""

import logging
import threading
import time
from collections import Counter
from functools import cache

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from app.config import get_settings
from app.errors import RateLimited

log = logging.getLogger(__name__)

WINDOW_S = 60
BROKER_TIMEOUT_S = 0.2
BROKER_PAUSE_S = 5.0  # so long nobody waits for a broker that did not answer
STREAM_RETRY_S = 10

_broker_away_until = 0.0
_streams: Counter[str] = Counter()
_streams_lock = threading.Lock()


def count_request(key_id: str) -> dict[str, str]:
    """One request more; OpenAI's `x-ratelimit` headers, none where nothing is counted. Raises RateLimited."""
    limit = get_settings().requests_per_minute
    window, passed_s = divmod(time.time(), WINDOW_S)
    count = _count(f"tuneyard:requests:{key_id}:{int(window)}") if limit else None
    if count is None:
        return {}
    left_s = int(WINDOW_S - passed_s) + 1
    headers = {
        "x-ratelimit-limit-requests": str(limit),
        "x-ratelimit-remaining-requests": str(max(limit - count, 0)),
        "x-ratelimit-reset-requests": f"{left_s}s",
    }
    if count > limit:
        message = f"This API key may send {limit} requests a minute: wait {left_s} seconds."
        raise RateLimited(message, retry_after_s=left_s, more_headers=headers)
    return headers


def open_stream(key_id: str) -> None:
    """One open stream more; `close_stream` must follow. Raises RateLimited."""
    most = get_settings().max_open_streams
    with _streams_lock:
        if _streams[key_id] >= most:
            message = f"This API key has {most} streams open, as many as it may: close some."
            raise RateLimited(message, retry_after_s=STREAM_RETRY_S)
        _streams[key_id] += 1


def close_stream(key_id: str) -> None:
    """The stream has ended, however it did."""
    with _streams_lock:
        _streams[key_id] -= 1
        if not _streams[key_id]:
            del _streams[key_id]


def _count(name: str) -> int | None:
    global _broker_away_until
    if time.monotonic() < _broker_away_until:
        return None
    try:
        both = _broker(get_settings().broker_as_redis).pipeline()
        both.incr(name)
        both.expire(name, 2 * WINDOW_S)
        return int(both.execute()[0])
    except (RedisError, OSError, ValueError) as error:  # a URL that this client cannot read counts nothing either
        _broker_away_until = time.monotonic() + BROKER_PAUSE_S
        log.warning("requests are not counted, the broker is away: %s", error)
        return None


@cache
def _broker(url: str) -> Redis:
    timeouts = {"socket_connect_timeout": BROKER_TIMEOUT_S, "socket_timeout": BROKER_TIMEOUT_S}
    return Redis.from_url(url, **timeouts, retry=Retry(NoBackoff(), 0))
