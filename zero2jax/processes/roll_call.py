"""A roll call before `jax.distributed` starts: which process is missing, or of another job, or runs other code.

Plain sockets, before any use of a device.

JAX's own start ends every process with SIGABRT when one does not arrive in time, and names none. So process 0 listens
first on the coordinator's port, each other process says one signed line there (`signed_lines`), and process 0 answers
all of them with the list of processes, or with what is wrong. Then the port is JAX's; the connections stay, for
`progress`.

Whoever else connects is of no account. Process 0 reads so many bytes from each connection that has not named itself,
for so many seconds, keeps so many of them, and drops the oldest beyond; a line with another token is refused by name.
"""

import contextlib
import hashlib
import itertools
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zero2jax.base.versions import installed_version
from zero2jax.processes.addresses import is_loopback, split_address
from zero2jax.processes.signed_lines import (
    MAX_LINE_BYTES,
    TOKEN,
    job_token,
    read_line,
    receive_line,
    signed_line,
)

_MAX_ANSWER_BYTES = 1 << 26  # the list of all processes
_MAX_UNNAMED = 128  # connections that have not said yet who they are
_LINE_S = 10.0  # what each of them may take to
_LAST_LOOK_S = 0.2
_MAX_REFUSALS = 20  # of which process 0 speaks
_RETRY_S = 0.1
_SAY_S = 15.0  # after which process 0 says once whom it waits for
_ANSWER_S = 10.0  # what process 0 may take to answer after its own time is up


class StartError(RuntimeError):
    """The processes cannot start together; says which, where, and what to look at."""


@dataclass(frozen=True)
class Entry:
    """What one process says of itself: its place, where it runs, and versions and digests of its code."""

    process_index: int
    num_processes: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    code: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"process {self.process_index} (host {self.host}, pid {self.pid})"

    def is_sound(self) -> bool:
        """Whether the fields are of their types: JSON from elsewhere may hold anything."""
        numbers = (self.process_index, self.num_processes, self.pid)
        return (
            all(type(x) is int and 0 <= x < 1 << 63 for x in numbers)
            and self.process_index < self.num_processes
            and isinstance(self.host, str)
            and len(self.host) < 256
            and self.host.isprintable()
            and isinstance(self.code, dict)
        )


def code_versions() -> dict[str, str]:
    """Versions of Python and the packages, digests of this package's sources and of the script that runs."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    known = script is not None and Path(script).is_file()
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: installed_version(name) or "none" for name in ("jax", "jaxlib")},
        "zero2jax sources": sources_digest(Path(__file__).parents[1]),
        "script": hashlib.sha256(Path(script).read_bytes()).hexdigest()[:12] if known and script else "none",
    }


def sources_digest(package: Path) -> str:
    """A checksum of the names and contents of every Python file below a folder."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Roll:
    """All processes, by index, and the open connections: of process 0 to each other one, of the others to process 0."""

    entries: list[Entry]
    connections: dict[int, socket.socket]

    def close(self) -> None:
        """End the connections."""
        for connection in self.connections.values():
            connection.close()


def call_roll(me: Entry, address: str, timeout_s: float, token: str | None = None) -> Roll:
    """Wait until all processes have said who they are.

    Args:
      me: this process.
      address: "host:port" of process 0.
      timeout_s: how long this process waits for the others.
      token: the job's secret; by default that of the environment.

    Raises:
      StartError: a process did not arrive (all who did get the names of those who did not), or went away again; two
        have the same index; counts, code or tokens differ; the port of process 0 is taken.
    """
    token = job_token() if token is None else token
    if me.num_processes == 1:
        _listen(address).close()
        return Roll([me], {})
    if me.process_index == 0:
        return _Caller(me, address, timeout_s, token).take()
    return _answer(me, address, timeout_s, token)


@dataclass
class _Unnamed:
    """A connection that has not said who it is: what it has said, and until when it may."""

    deadline: float
    text: bytearray = field(default_factory=bytearray)


class _Caller:
    """Process 0's side."""

    def __init__(self, me: Entry, address: str, timeout_s: float, token: str):
        self.me, self.address, self.timeout_s, self.token = me, address, timeout_s, token
        self.entries = {0: me}
        self.unnamed: dict[socket.socket, _Unnamed] = {}  # the oldest first
        self.named: dict[socket.socket, Entry] = {}
        self.refused: list[str] = []
        self.selector = selectors.DefaultSelector()

    def take(self) -> Roll:
        deadline = time.monotonic() + self.timeout_s
        with _listen(self.address) as listener, self.selector:
            listener.setblocking(False)
            self.selector.register(listener, selectors.EVENT_READ)
            try:
                said_at = time.monotonic() + _SAY_S
                while len(self.entries) < self.me.num_processes:
                    if time.monotonic() >= deadline:
                        raise StartError(self._missing())
                    if time.monotonic() >= said_at:
                        print(f"zero2jax: {self._waiting()}", file=sys.stderr, flush=True)
                        said_at = deadline
                    self._serve(listener, min(deadline, said_at))
                # Who has spoken by now may have an index twice; strangers may never cease.
                last = min(deadline, time.monotonic() + _LAST_LOOK_S)
                while self._serve(listener, 0.0) and time.monotonic() < last:
                    pass
                entries = [self.entries[i] for i in range(self.me.num_processes)]
                _check_code(entries)
            except StartError as error:
                self._tell({"error": str(error)})
                for connection in self.named:
                    connection.close()
                raise
            finally:
                for connection in self.unnamed:
                    connection.close()
            self._tell({"entries": [asdict(entry) for entry in entries]})
        return Roll(entries, {entry.process_index: connection for connection, entry in self.named.items()})

    def _serve(self, listener: socket.socket, deadline: float) -> bool:
        """Wait for what comes, until a deadline, and take it, those known before those new; whether anything came."""
        until = min([deadline, *(unnamed.deadline for unnamed in list(self.unnamed.values())[:1])])
        events = self.selector.select(max(0.0, until - time.monotonic()))
        for key, _ in sorted(events, key=lambda event: event[0].fileobj is listener):
            if key.fileobj is listener:
                self._accept(listener)
            elif isinstance(key.fileobj, socket.socket):
                self._read(key.fileobj)
        late = [c for c, unnamed in self.unnamed.items() if time.monotonic() >= unnamed.deadline]
        for connection in late:
            self._drop(connection)
        return bool(events)

    def _accept(self, listener: socket.socket) -> None:
        while len(self.unnamed) >= _MAX_UNNAMED:
            self._drop(next(iter(self.unnamed)))
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if self.unnamed:
                self._drop(next(iter(self.unnamed)))
                return
            raise StartError(
                f"starting {self.me.num_processes} processes: process 0 cannot take another connection "
                f"({error.strerror}), with {len(self.named)} open. Raise its limit of open files (`ulimit -n`)."
            ) from error
        connection.setblocking(False)
        self.unnamed[connection] = _Unnamed(time.monotonic() + _LINE_S)
        self.selector.register(connection, selectors.EVENT_READ)

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.unnamed.pop(connection, None)
        connection.close()

    def _read(self, connection: socket.socket) -> None:
        """Take what has arrived."""
        try:
            data = connection.recv(MAX_LINE_BYTES)
        except OSError:
            data = b""
        if connection in self.named:
            if not data:
                raise StartError(
                    f"starting {self.me.num_processes} processes: {self.named[connection]} arrived and ended again "
                    f"before all were there. Look at the end of its log."
                )
            return
        if connection not in self.unnamed:
            return  # dropped since
        text = self.unnamed[connection].text
        text += data
        if b"\n" in data:
            self._name(connection, bytes(text).partition(b"\n")[0])
        elif not data or len(text) >= MAX_LINE_BYTES:
            self._drop(connection)

    def _name(self, connection: socket.socket, line: bytes) -> None:
        message, authentic = read_line(line, self.token)
        entry = _entry(message)
        if entry is None:
            self._drop(connection)  # not one of us
        elif not authentic:
            self._refuse(connection, entry)
        else:
            del self.unnamed[connection]
            self.named[connection] = entry
            self._check(entry)
            self.entries[entry.process_index] = entry

    def _refuse(self, connection: socket.socket, entry: Entry) -> None:
        problem = (
            "it has another token, or none"
            if self.token
            else f"it has a token ({TOKEN}), and process 0 has none"
        )
        said = (
            f"{entry} is refused at {self.address}: {problem}, so it is of another job. Give all processes of a job "
            f"the same {TOKEN}, as one launcher does, and each job a port of its own (MASTER_PORT)."
        )
        if said not in self.refused and len(self.refused) < _MAX_REFUSALS:
            self.refused.append(said)
            print(f"zero2jax: {said}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # gone
            connection.send(signed_line({"refused": said}, self.token))
        self._drop(connection)

    def _check(self, entry: Entry) -> None:
        if entry.num_processes != self.me.num_processes:
            raise StartError(
                f"starting processes at {self.address}: {entry} expects {entry.num_processes} processes, and {self.me} "
                f"expects {self.me.num_processes}. Give all of them the same number (WORLD_SIZE), and each run a port "
                f"of its own (MASTER_PORT)."
            )
        if entry.process_index in self.entries:
            raise StartError(
                f"starting {entry.num_processes} processes at {self.address}: {self.entries[entry.process_index]} and "
                f"{entry} have the same index. Each needs its own (RANK), from 0 to {entry.num_processes - 1}."
            )

    def _absent(self) -> str:
        # A count that is a slip of the pen may be beyond any list.
        missing = (i for i in range(self.me.num_processes) if i not in self.entries)
        more = self.me.num_processes - len(self.entries) - 20
        return ", ".join(map(str, itertools.islice(missing, 20))) + (f" and {more} more" if more > 0 else "")

    def _waiting(self) -> str:
        return (
            f"waiting for process {self._absent()} of {self.me.num_processes} at {self.address}, for "
            f"{self.timeout_s:g} s at most ({len(self.entries)} arrived)"
        )

    def _missing(self) -> str:
        arrived = ", ".join(str(entry) for _, entry in sorted(self.entries.items())[:20])
        host = split_address(self.address)[0]
        hint = f" Other hosts cannot reach {host}." if is_loopback(host) else ""
        refused = "".join(f" Refused: {said}" for said in self.refused[:3])
        return (
            f"starting {self.me.num_processes} processes: process {self._absent()} did not arrive at {self.address} "
            f"within {self.timeout_s:g} s; arrived: {arrived}.{hint}{refused} Look at the end of the logs of the "
            f"missing, check that their hosts can reach that address, or raise initialization_timeout_s."
        )

    def _tell(self, answer: dict[str, Any]) -> None:
        """Answer those that are named, and wait for none that does not read beyond a common deadline."""
        line, deadline = signed_line(answer, self.token), time.monotonic() + _ANSWER_S
        for connection in self.named:
            try:
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                connection.sendall(line)
            except OSError:
                pass  # gone; its own log says why


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        if is_loopback(host):  # no other host has to reach it
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=1024)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        return socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise StartError(
            f"starting as process 0 (host {socket.gethostname()}): cannot listen on port {port} ({error.strerror}). "
            f"Another run may hold it: choose another port (MASTER_PORT). Or a second process has index 0: "
            f"give each its own (RANK)."
        ) from error


def _check_code(entries: Sequence[Entry]) -> None:
    first = entries[0]
    different = [
        f"{entry}: {name} {entry.code.get(name)}, not {value}"
        for entry in entries[1:]
        for name, value in first.code.items()
        if entry.code.get(name) != value
    ]
    if different:
        more = f"; and {len(different) - 8} more" if len(different) > 8 else ""
        raise StartError(
            f"starting {len(entries)} processes: their code differs from that of {first}. "
            f"{'; '.join(different[:8])}{more}. All processes must run the same program: install the same versions."
        )


def _answer(me: Entry, address: str, timeout_s: float, token: str) -> Roll:
    """The side of every process but 0."""
    deadline = time.monotonic() + timeout_s
    problem = "no connection"
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection(split_address(address), timeout=5)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            try:
                answer = _ask(connection, me, deadline + _ANSWER_S, token)
            except OSError as error:
                answer, problem = None, error.strerror or str(error)
            if answer is not None and "entries" in answer:
                return Roll(_entries_with(me, answer["entries"]), {0: connection})
            connection.close()
            if answer is not None:
                raise StartError(str(answer.get("error") or answer.get("refused")))
            problem = "something else answers there, or process 0 ended"
        time.sleep(_RETRY_S)
    raise StartError(
        f"starting as {me} of {me.num_processes}: process 0 did not answer at {address} within {timeout_s:g} s "
        f"({problem}). Look at the end of its log, check that it runs on that host, that the port is open and that no "
        f"other process has index {me.process_index} (RANK), or raise initialization_timeout_s."
    )


def _ask(connection: socket.socket, me: Entry, deadline: float, token: str) -> dict[str, Any] | None:
    """What process 0 answers, or None if something else does."""
    if connection.getsockname() == connection.getpeername():
        raise ConnectionRefusedError("connected to itself")  # the kernel chose that very port
    connection.sendall(signed_line(asdict(me), token))
    answer, authentic = read_line(receive_line(connection, deadline, _MAX_ANSWER_BYTES) or b"", token)
    if answer is None:
        return None
    # A refusal is signed with a token that is not ours; nothing else that is so counts.
    known = {"error", "entries", "refused"} if authentic else {"refused"}
    said = {name: answer[name] for name in known & set(answer)}
    rows = said.get("entries")
    is_list = isinstance(rows, list) and len(rows) == me.num_processes and None not in map(_entry, rows)
    return said if is_list or (said and rows is None) else None


def _entry(message: Any) -> Entry | None:
    """What a process says of itself, or None if it is nothing of the kind."""
    try:
        entry = Entry(**message)
    except TypeError:
        return None
    return entry if entry.is_sound() else None


def _entries_with(me: Entry, rows: list[dict[str, Any]]) -> list[Entry]:
    entries = [Entry(**row) for row in rows]
    if entries[me.process_index] != me:
        raise StartError(
            f"starting {me.num_processes} processes: {entries[me.process_index]} has the index of {me}. Each needs its "
            f"own (RANK), from 0 to {me.num_processes - 1}."
        )
    return entries
