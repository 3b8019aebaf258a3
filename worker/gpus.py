"""This machine's NVIDIA GPUs, as NVML tells: what there is, and what still holds memory. The one place that talks to NVML."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# Below this a GPU counts as free: drivers and monitors keep some hundred MB of an idle one, a trainer tens of GB.
FREE_BELOW_BYTES = 1 << 30
# After SIGKILL the driver frees memory within a second or two, after a large context or under load within some more.
PATIENCE_S = 30.0
POLL_S = 0.5


def found() -> tuple[list[dict[str, Any]], str | None]:
    """Every GPU as {"uuid", "name", "memory_bytes"}, and the driver's version; none where there is no NVIDIA driver."""
    with _nvml() as nvml:
        if nvml is None:
            return [], None
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_described(nvml, handle) for handle in handles], nvml.nvmlSystemGetDriverVersion()


def still_held(uuids: Sequence[str], patience_s: float = PATIENCE_S) -> list[str]:
    """Those of the GPUs whose memory is not free again within `patience_s`; also those that NVML cannot ask any more."""
    deadline = time.monotonic() + patience_s
    while (held := _held_now(uuids)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return held


def _held_now(uuids: Sequence[str]) -> list[str]:
    if not uuids:
        return []
    with _nvml() as nvml:
        return [uuid for uuid in uuids if nvml is None or not _is_free(nvml, uuid)]


def _is_free(nvml: Any, uuid: str) -> bool:
    try:
        return bool(_memory(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)).used < FREE_BELOW_BYTES)
    except nvml.NVMLError:  # it fell off the bus, or the driver hangs
        return False


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 counts the driver's own reserve apart from what is used; old drivers know only version 1."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _described(nvml: Any, handle: Any) -> dict[str, Any]:
    return {
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "name": nvml.nvmlDeviceGetName(handle),
        "memory_bytes": nvml.nvmlDeviceGetMemoryInfo(handle).total,
    }


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML between its init and its shutdown; None where there is no NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
