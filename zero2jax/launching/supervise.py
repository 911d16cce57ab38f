"""Running several commands as one: outputs interleaved by line with a prefix, the first failure ends all, no orphans.

One thread: a selector over the commands' outputs, and a look at who has ended ten times a second. Each command leads a
session of its own, so that signals reach it from here alone and its descendants can be ended with it; on Linux the
kernel kills it if this process dies.
"""

import collections
import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zero2jax.processes.preemption import PREEMPTED_EXIT_CODE
from zero2jax.processes.progress import WAITING

NUM_LAST_LINES = 30
_TICK_S = 0.1
# For processes that wait for one that is gone: they have nothing left to save. JAX catches SIGTERM as a notice of
# preemption, so most of them need the SIGKILL that follows.
_FAILURE_GRACE_S = 3.0
_ALONE_S = 30.0  # after so long without one that has ended, say that others go on
_DRAIN_S = 1.0  # for what a command has left in its pipe, where a descendant may go on writing
_MAX_LINE_BYTES = 1 << 20  # longer lines are passed on in parts
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n)")  # progress bars end their lines by \r
# Of gloo, whenever processes meet.
_NOISE = re.compile(
    rb"\[Gloo\] Rank |.* is connected to \d+ peer ranks. Expected number of connected peer ranks"
)
# How the errors begin of a process that waited for one that is gone: Python's, absl's, glibc's.
_ERRORS = re.compile(
    rb"Traceback \(most recent|[EF]\d{4} \d\d:\d\d:|\*\*\* |terminate called|Fatal Python error"
)
# What one says that was left alone by another in a collective: gloo's words, and NCCL's.
_LEFT_ALONE = re.compile(
    rb"Gloo \w+ failed: .*(closed by peer|reset by peer|Broken pipe)|remote process exited"
)
# Asks the kernel for SIGKILL when the parent dies (PR_SET_PDEATHSIG, 1), and becomes the command. A program of its own
# and no `preexec_fn`: that one forks Python, which must not be done beside JAX's threads.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        hint = "Is it a program? A script needs a first line like #!/bin/sh, with an interpreter that is there."
        sys.exit(f"launching {sys.argv[2]}: {error.strerror}. {hint}")
"""


@dataclass(frozen=True)
class Command:
    """One command: its name in prefixes and messages, arguments, environment, and a file for its output.

    `keep_stdin` gives it a pipe whose end tells it to end, also when this process dies; `stdin` is written there first.
    """

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path | None = None
    keep_stdin: bool = False
    stdin: bytes = b""


@dataclass(frozen=True)
class Outcome:
    """How the commands ended: the exit code for all; who failed by itself, first the cause; the cause's last lines.

    `signal` is the signal that this process was sent, if any. The code is then 128 more, or the one that all those
    running ended with, if that is an error code: programs that save on request say so by it. `preempted` is whether
    some ended with `PREEMPTED_EXIT_CODE` unasked; that is no failure. `waited_for` is the last line in which the
    processes said whom they wait for; `num_hidden` counts lines not shown, errors of those that had waited for the
    cause: a file of a command has all of its lines.
    """

    code: int
    failed: tuple[str, ...] = ()
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    signal: int | None = None
    preempted: bool = False
    waited_for: str = ""
    num_hidden: int = 0


def run_together(
    commands: Sequence[Command],
    *,
    grace_s: float = 30,
    end_with_stdin: bool = False,
    write: Callable[[bytes], None] | None = None,
) -> Outcome:
    """Run commands until all have ended, or one has failed and the others have been ended.

    SIGINT and SIGTERM are passed on to all of them, which then have `grace_s` seconds to end; a second one kills them.
    When one ends with `PREEMPTED_EXIT_CODE`, the others have `grace_s` seconds to do so, too, before they are sent
    SIGTERM. Call it from the main thread.

    Args:
      commands: what to run.
      grace_s: seconds between a signal passed on and SIGKILL.
      end_with_stdin: take the end of this process's standard input as SIGTERM.
      write: where lines go; standard output by default.

    Raises:
      ValueError: standard input is to be watched, and cannot be.
    """
    if end_with_stdin:
        _check_stdin()
    group = _Group(commands, write or _write_stdout)
    with group.signals_passed_on(grace_s):
        try:
            group.start()
            if end_with_stdin:
                group.watch_stdin()
            while group.running:
                group.tick()
                group.end_all_after_failure()
                group.end_all_after_preemption()
                group.say_who_goes_on()
        finally:
            group.kill()
    return group.outcome()


def _check_stdin() -> None:
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    # Closed, or /dev/null or a file, whose end no selector waits for.
    except (AttributeError, ValueError, OSError) as error:
        raise ValueError(
            "launching with --end-with-stdin: standard input is closed, or a file; it must be a pipe or a terminal, "
            "whose end can be waited for. Give it one, or leave out the option."
        ) from error


def _write_stdout(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


class _Running:
    """One command that was started."""

    def __init__(self, command: Command, prefix: bytes, write: Callable[[bytes], None]):
        self.command, self.prefix, self.write = command, prefix, write
        self.last_lines: collections.deque[bytes] = collections.deque(maxlen=NUM_LAST_LINES)
        self.unfinished, self.after_return = b"", False
        self.told = False
        self.waited_for = b""
        self.left_alone = False
        self.quiet = False  # another one has failed, and what this one says of that is hidden
        self.num_hidden, self.hides = 0, False
        self.log: IO[bytes] | None = None
        if command.log is not None:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            self.log = command.log.open("wb")
        self.process = subprocess.Popen(
            _guarded(command.arguments),
            env=command.environment,
            stdin=subprocess.PIPE if command.keep_stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                self.process.stdin.write(command.stdin)
                self.process.stdin.flush()
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)

    def read(self) -> bool:
        """Pass on what there is to read; False at the end."""
        try:
            data = os.read(self.output.fileno(), 1 << 16)
        except BlockingIOError:
            return True
        if self.log is not None:
            self.log.write(data)
            self.log.flush()
        text = self.unfinished + (data[1:] if self.after_return and data[:1] == b"\n" else data)
        self.after_return = data[-1:] == b"\r"
        used = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        for match in _LINE.finditer(text, 0, used):
            if match[1] or match[2] != b"\r":
                self.pass_on(match[1], keep=match[2] != b"\r")
        self.unfinished = text[used:]
        if self.unfinished and (not data or len(self.unfinished) > _MAX_LINE_BYTES):
            self.pass_on(self.unfinished)
            self.unfinished = b""
        return bool(data)

    def pass_on(self, line: bytes, *, keep: bool = True) -> None:
        if _NOISE.match(line):
            return
        if WAITING.encode() in line[:60]:  # another launcher's prefix may stand before
            self.waited_for = line
        self.left_alone = self.left_alone or _LEFT_ALONE.search(line) is not None
        self.hides = self.hides or (self.quiet and _ERRORS.match(line) is not None)
        if self.hides:
            self.num_hidden += 1
            return
        if keep:
            self.last_lines.append(line)
        self.write(self.prefix + line + b"\n")

    @property
    def had_waited(self) -> bool:
        """Whether it ended by an error because another one was gone."""
        return self.left_alone or self.process.returncode == -signal.SIGABRT

    def drain(self) -> None:
        """Read what is left after the command has ended; a descendant that holds the pipe is not waited for."""
        deadline_s = time.monotonic() + _DRAIN_S
        with contextlib.suppress(OSError):
            while self.read() and _is_readable(self.output) and time.monotonic() < deadline_s:
                pass
        if self.unfinished:
            self.pass_on(self.unfinished)
            self.unfinished = b""
        if self.log is not None:
            self.log.close()

    def send(self, number: int) -> None:
        self.told = True
        if self.process.stdin is not None and number != signal.SIGKILL:
            self.process.stdin.close()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _cause_first(running: _Running) -> int:
    """The order of blame among those that ended together.

    A signal from outside first: those that wait for a process which is gone end by an error of their own a moment
    later, or JAX aborts them, which comes last.
    """
    code = running.process.returncode
    last = {PREEMPTED_EXIT_CODE: 2, -signal.SIGABRT: 3}
    return last.get(code, 0 if code < 0 else 1)


def _is_readable(file: IO[bytes]) -> bool:
    """Whether there is something to read now, the end included."""
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(0))


def _guarded(arguments: tuple[str, ...]) -> tuple[str, ...]:
    if sys.platform != "linux":
        return arguments
    return (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *arguments)


class _Group:
    def __init__(self, commands: Sequence[Command], write: Callable[[bytes], None]):
        self.commands, self.write = commands, write
        self.running: list[_Running] = []
        self.started: list[_Running] = []
        self.failed: list[_Running] = []
        self.preempted: list[_Running] = []
        self.signal: int | None = None
        self.codes: set[int] = set()  # of those that ended after the signal
        self.end_at = float("inf")
        self.kill_at = float("inf")
        self.ending = False
        self.first_done: tuple[str, float] | None = None  # who ended without an error, and when
        self.grace_s = 0.0
        self.selector = selectors.DefaultSelector()

    def start(self) -> None:
        width = max((len(command.name) for command in self.commands), default=0)
        for command in self.commands:
            if self.ending:
                break  # a signal came
            prefix = f"[{command.name:>{width}}] ".encode()
            started = _Running(command, prefix, self.write)
            self.running.append(started)
            self.started.append(started)
            if self.signal is not None and not started.told:
                started.send(self.signal)
            self.selector.register(started.output, selectors.EVENT_READ, started)

    def watch_stdin(self) -> None:
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)

    @contextlib.contextmanager
    def signals_passed_on(self, grace_s: float) -> Iterator[None]:
        self.grace_s = grace_s
        before = {
            number: signal.signal(number, lambda n, _: self.pass_on(n))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pass_on(self, number: int) -> None:
        """Send a signal to all; the second one kills."""
        if self.signal is not None:
            self.kill_at = 0.0
            return
        self.signal = number
        self.end(number, self.grace_s)

    def end(self, number: int, grace_s: float) -> None:
        self.ending = True
        self.kill_at = min(self.kill_at, time.monotonic() + grace_s)
        for running in self.running:
            running.send(number)

    def tick(self) -> None:
        """Pass on output, and sort out who has ended."""
        if not self.selector.get_map():
            time.sleep(_TICK_S)
        ready = [key.fileobj for key, _ in self.selector.select(_TICK_S)]
        self.sort_out_ended()  # first, so that it is known who has failed when the others speak of it
        for key in [key for key in self.selector.get_map().values() if key.fileobj in ready]:
            if key.data is None:
                if not os.read(sys.stdin.fileno(), 4096):
                    self.selector.unregister(key.fileobj)
                    self.pass_on(signal.SIGTERM)
            elif not key.data.read():
                self.selector.unregister(key.fileobj)
        if time.monotonic() >= self.kill_at:
            for running in self.running:
                running.send(signal.SIGKILL)

    def sort_out_ended(self) -> None:
        ended = [running for running in self.running if running.process.poll() is not None]
        if ended:  # a look at all takes a while: who ended in it may be the cause
            ended = [running for running in self.running if running.process.poll() is not None]
        for running in sorted(ended, key=_cause_first):
            self.running.remove(running)
            self.finish(running)
            self.sort_in(running)

    def sort_in(self, running: _Running) -> None:
        code = running.process.returncode
        if self.signal is not None:
            self.codes.add(code)
        elif code == 0 or (self.ending and not self.is_cause(running)):
            self.first_done = self.first_done or (running.command.name, time.monotonic())
        elif code == PREEMPTED_EXIT_CODE:
            self.preempted.append(running)
            self.end_at = min(self.end_at, time.monotonic() + self.grace_s)
        elif not self.preempted:  # else it could not go on without the one that has ended
            self.failed.append(running)
            if code != -signal.SIGABRT:  # that one may have waited itself
                for other in self.running:
                    other.quiet = True

    def is_cause(self, running: _Running) -> bool:
        """Whether one that ended after a failure had failed by itself: those seen to fail had waited for it."""
        itself = 0 < running.process.returncode < 128 and running.process.returncode != PREEMPTED_EXIT_CODE
        return itself and bool(self.failed) and all(other.had_waited for other in self.failed)

    def finish(self, running: _Running) -> None:
        running.send(signal.SIGKILL)  # descendants that it left behind
        if running.output in [key.fileobj for key in self.selector.get_map().values()]:
            self.selector.unregister(running.output)
        running.drain()
        running.output.close()
        if running.process.stdin is not None:
            running.process.stdin.close()

    def end_all_after_failure(self) -> None:
        if self.failed and not self.ending:
            remote = any(running.process.stdin is not None for running in self.running)
            self.end(signal.SIGTERM, self.grace_s + _FAILURE_GRACE_S if remote else _FAILURE_GRACE_S)

    def end_all_after_preemption(self) -> None:
        if time.monotonic() >= self.end_at and not self.ending:
            self.end(signal.SIGTERM, self.grace_s)

    def say_who_goes_on(self) -> None:
        """Say once that some go on long after one has ended: they may wait for it where JAX does not see it."""
        if self.first_done is None or self.ending or not self.running:
            return
        if time.monotonic() < self.first_done[1] + _ALONE_S:
            return
        names = ", ".join(running.command.name for running in self.running[:20])
        print(
            f"zero2jax launch: {self.first_done[0]} ended {_ALONE_S:g} s ago, without an error, and of the others "
            f"still run: {names}. If they wait for it in a step, they never end: Ctrl-C ends them.",
            file=sys.stderr,
            flush=True,
        )
        self.first_done = (self.first_done[0], float("inf"))

    def kill(self) -> None:
        for running in self.running:
            running.send(signal.SIGKILL)
            running.process.wait()
            self.finish(running)
        self.selector.close()

    def outcome(self) -> Outcome:
        if self.signal is not None:
            (code, *others) = self.codes or {0}
            alike = code > 0 and not others
            return Outcome(code if alike else 128 + self.signal, signal=self.signal)
        if not self.failed:
            preempted = bool(self.preempted)
            return Outcome(PREEMPTED_EXIT_CODE if preempted else 0, preempted=preempted)
        failed = [running for running in self.failed if not running.had_waited] or self.failed
        cause = failed[0]
        code = cause.process.returncode
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        return Outcome(
            code=code if code > 0 else 128 - code,
            failed=tuple(running.command.name for running in failed),
            reason=how,
            last_lines=tuple(line.decode(errors="replace") for line in cause.last_lines),
            waited_for=next(
                (x.waited_for.decode(errors="replace") for x in self.started if x.waited_for), ""
            ),
            num_hidden=sum(running.num_hidden for running in self.started),
        )
