"""Which process keeps the others waiting: each says now and then where it stands, and process 0 names the one behind.

A process that has left the training loop while others step on (one had fewer batches), or that hangs in its own code,
stops all the others inside a collective. JAX says nothing for minutes, or for ever, and blames those that waited. So
every process tells process 0 how many steps of an engine it has begun, at which line of the user's code it stands, and
whether its program has ended, over the connections of the roll call. When all stand still for `STILL_S` and not at the
same point, process 0 says who is behind. It ends nobody: a process may have work of its own.

Steps come from `jax.monitoring`, to which the engine reports each as `STEP_EVENT`.
"""

import atexit
import selectors
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import jax

from zero2jax.processes.roll_call import Entry, Roll
from zero2jax.processes.signed_lines import MAX_LINE_BYTES, read_line, signed_line

STEP_EVENT = "/zero2jax/step"
STILL_S = 30.0  # how long all must stand still
_EVERY_S = 2.0
WAITING = "zero2jax: waiting for process"  # how the line begins; the launcher says it again at the end
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(threading.__file__).parent))


@dataclass(frozen=True)
class Standing:
    """Where a process stands: steps begun, whether its program has ended, and the line of its code that runs."""

    steps: int = 0
    ended: bool = False
    at: str = ""

    def __str__(self) -> str:
        where = f" at {self.at}" if self.at else ""
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        return (
            f"has ended its program after {steps}" if self.ended else f"has begun {steps} and stands{where}"
        )


@dataclass
class Board:
    """The standings of all processes, by index, and when each last moved."""

    entries: Sequence[Entry]
    standings: dict[int, Standing] = field(default_factory=dict)
    moved: dict[int, float] = field(default_factory=dict)
    said: list[tuple[int, bool]] | None = None

    def put(self, index: int, standing: Standing, now: float) -> None:
        """Note where a process stands."""
        before = self.standings.get(index)
        if before is None or (before.steps, before.ended) != (standing.steps, standing.ended):
            self.moved[index] = now
        self.standings[index] = standing

    def behind(self, now: float) -> list[int]:
        """Those that the others wait for: the fewest steps, or a program that goes on alone.

        Known once all have ended, else once all have stood still. Without steps it is taken to be those that have
        ended, of which the others may want an answer.
        """
        everyone = range(len(self.entries))
        if not self.all_ended and any(now - self.moved.get(i, now) < STILL_S for i in everyone):
            return []
        most = max(self.standings[i].steps for i in everyone)
        fewer = [i for i in everyone if self.standings[i].steps < most]
        ended = [i for i in everyone if self.standings[i].ended]
        going = [i for i in everyone if i not in ended]
        if fewer or not (ended and going):
            return fewer  # also where all have ended: their last steps may still run
        return going if most else ended

    @property
    def all_ended(self) -> bool:
        """Whether every program has."""
        return len(self.standings) == len(self.entries) and all(x.ended for x in self.standings.values())

    def news(self, now: float) -> str:
        """One line on who keeps the others waiting, once for each such state; else ""."""
        behind = self.behind(now)
        state = [(x.steps, x.ended) for _, x in sorted(self.standings.items())]
        if not behind or state == self.said:
            return ""
        self.said = state
        others = [i for i in range(len(self.entries)) if i not in behind]
        since, rule = f", for {STILL_S:g} s", "In a step, and at their end, all wait for each other"
        if self.all_ended:
            since, rule = "", "The steps that only some have begun never end"
        return (
            f"{WAITING} {', '.join(map(str, behind))}{since}: {self._describe(behind)}; "
            f"{self._describe(others)}. {rule}: give all of them the same number of batches."
        )

    def _describe(self, indices: Sequence[int]) -> str:
        more = f"; and {len(indices) - 4} more" if len(indices) > 4 else ""
        return "; ".join(f"{self.entries[i]} {self.standings[i]}" for i in indices[:4]) + more


class Progress:
    """This process's part: it counts its steps, and tells process 0, or listens to the others if it is process 0."""

    def __init__(self, roll: Roll, me: int, token: str):
        self.roll, self.me, self.token = roll, me, token
        self.steps, self.ended = 0, False
        self.told_all, self.sending = threading.Event(), threading.Lock()
        self.main = threading.main_thread().ident

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        jax.monitoring.register_event_listener(self._count)
        atexit.register(self._end)  # before JAX's own handler, which waits for all
        run = self._listen if self.me == 0 else self._tell
        threading.Thread(target=run, name="zero2jax progress", daemon=True).start()

    def _count(self, event: str, **details: Any) -> None:
        # A mesh of a process's own devices is its own affair.
        self.steps += event == STEP_EVENT and details["num_devices"] > jax.local_device_count()

    def _end(self) -> None:
        """Say so before JAX's own handler lets all go as soon as all are there, even with steps that still run."""
        self.ended = True
        if self.me == 0:
            self.told_all.wait(STILL_S + _EVERY_S)
        else:
            self._send()

    def _here(self) -> Standing:
        frame = None if self.ended else sys._current_frames().get(self.main or 0)
        return Standing(self.steps, self.ended, user_line(frame))

    def _tell(self) -> None:
        while self._send():
            time.sleep(_EVERY_S)

    def _send(self) -> bool:
        """Tell process 0 where this one stands; False if it is gone, and JAX ends this process."""
        with self.sending:
            try:
                self.roll.connections[0].settimeout(_EVERY_S)
                self.roll.connections[0].sendall(signed_line(asdict(self._here()), self.token))
            except TimeoutError:
                return True  # it does not listen now; a part of a line is no line of ours
            except OSError:
                return False
        return True

    def _listen(self) -> None:
        try:
            self._watch()
        finally:
            self.told_all.set()

    def _watch(self) -> None:
        """Note what the others say, until all have ended or one is gone; JAX and the launcher speak of that."""
        board = Board(self.roll.entries)
        texts = {connection: bytearray() for connection in self.roll.connections.values()}
        with selectors.DefaultSelector() as selector:
            for index, connection in self.roll.connections.items():
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, index)
            while True:
                board.put(0, self._here(), time.monotonic())
                for key, _ in selector.select(_EVERY_S / 4):
                    assert isinstance(key.fileobj, socket.socket)
                    lines = _read_lines(key.fileobj, texts[key.fileobj])
                    if lines is None:
                        return
                    for line in lines[-1:]:
                        if (standing := _standing(*read_line(line, self.token))) is not None:
                            board.put(key.data, standing, time.monotonic())
                if news := board.news(time.monotonic()):
                    print(news, file=sys.stderr, flush=True)
                if board.all_ended:
                    return
                if not self.ended:
                    time.sleep(_EVERY_S / 4)


def _read_lines(connection: socket.socket, text: bytearray) -> list[bytes] | None:
    """The lines that are complete by what has arrived now; None if the connection has ended."""
    try:
        data = connection.recv(MAX_LINE_BYTES)
    except OSError:
        return None
    text += data
    if not data or len(text) > 2 * MAX_LINE_BYTES:
        return None
    *lines, rest = bytes(text).split(b"\n")
    text[:] = rest
    return lines


def _standing(message: Mapping[str, Any] | None, authentic: bool) -> Standing | None:
    try:
        return Standing(**message) if message is not None and authentic else None
    except TypeError:
        return None


def user_line(frame: FrameType | None) -> str:
    """file:line of the innermost frame that is neither of a library nor of Python."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(("<", *_LIBRARIES)) and "-packages" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
