"""A thread that does pieces of work in their order while the training loop goes on."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable

Work = Callable[[], None]

MAX_WAITING = 1000
CLOSE_TIMEOUT_S = 30.0


class Background:
    """Runs work in a thread of its own.

    What still waits when the interpreter ends, or when nobody holds this object any more, is done then, for 30 seconds
    at most: a service that does not answer keeps no process alive. Of two, the later one ends first: it may hand work
    to the earlier one until its end.

    Args:
      name: of the thread.
      at_end: done last; it is to hold nothing that holds this object.
      max_waiting: pieces of work that may wait.
    """

    def __init__(self, name: str, at_end: Work = lambda: None, max_waiting: int = MAX_WAITING):
        self._waiting: queue.Queue[Work | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=_run, args=(self._waiting, at_end), name=name, daemon=True)
        self._thread.start()
        self._finish = weakref.finalize(self, _finish, self._waiting, self._thread)
        atexit.register(self._finish)  # before jax, which was imported earlier, lets its devices go

    def put(self, work: Work) -> bool:
        """Have `work` done, which must not raise; False, and nothing, where too much waits already."""
        try:
            self._waiting.put_nowait(work)
        except queue.Full:
            return False
        return True

    def close(self) -> bool:
        """Wait until everything is done, for 30 seconds at most; whether it is. There is to be no more work."""
        atexit.unregister(self._finish)
        self._finish()
        return not self._thread.is_alive()


def _run(waiting: "queue.Queue[Work | None]", at_end: Work) -> None:
    while (work := waiting.get()) is not None:
        work()
        del work  # with the arrays that it holds, while the next one is waited for
    at_end()


def _finish(waiting: "queue.Queue[Work | None]", thread: threading.Thread) -> None:
    try:
        waiting.put(None, timeout=CLOSE_TIMEOUT_S)
    except queue.Full:
        return
    if thread is not threading.current_thread():
        thread.join(CLOSE_TIMEOUT_S)
