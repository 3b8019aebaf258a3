"""Two Linux process controls that Python has no name for (prctl(2))."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the thread that forked it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Descendants whose parent ends become our children instead of init's, so that none is lost sight of."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
