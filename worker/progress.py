"""Whether a training moves on: what the trainer shows it by is a file that it writes anew at every step."""

import time

from worker.workspace import Workspace


class Progress:
    """A slow training told apart from a stalled one, by the clock of whoever watches."""

    def __init__(self, workspace: Workspace, timeout_s: float) -> None:
        self._path = workspace.progress
        self._timeout_s = timeout_s
        self._seen: str | None = None
        self._seen_at = time.monotonic()

    def has_stalled(self) -> bool:
        """Only within the training itself: the file is there from its first step to its last."""
        try:
            count = self._path.read_text()
        except OSError:
            count = None
        if count != self._seen:
            self._seen, self._seen_at = count, time.monotonic()
        return count is not None and time.monotonic() - self._seen_at > self._timeout_s
