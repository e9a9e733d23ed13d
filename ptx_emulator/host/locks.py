"""Locks that stay usable in a forked child."""

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

_locks: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()


class ForkSafeLock:
    """Reentrant lock that is free in a forked child unless the forking thread holds it.

    A fork copies a lock that another thread holds, but not the thread that would release it. The
    child would wait forever.

    Args:
        on_orphaned: Called in a child whose parent forked while another thread held the lock, to
            repair the state that the lock guards.
    """

    def __init__(self, on_orphaned: Callable[[], object] | None = None) -> None:
        self._lock = threading.RLock()
        self._on_orphaned = on_orphaned
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def renew_in_child(self) -> None:
        """Replace the lock if a thread that did not survive the fork holds it."""
        if self._lock.acquire(blocking=False):  # it is free, or held by the thread that forked
            self._lock.release()
            return
        self._lock = threading.RLock()
        if self._on_orphaned is not None:
            self._on_orphaned()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew_in_child()


os.register_at_fork(after_in_child=_renew_all)
