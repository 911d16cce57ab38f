"""A roll call before `jax.distributed` starts: which process is missing, or of another run, or runs other code.

Plain sockets, before any use of a device.

JAX's own start ends every process with SIGABRT when one does not arrive in time, and names none. So process 0 listens
first on the coordinator's port, each other process says one line of JSON there, and process 0 answers all of them
with the list of processes, or with what is wrong. Then the port is JAX's.
"""

import hashlib
import json
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

_MAX_BYTES = 1 << 20
_RETRY_S = 0.1
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


def call_roll(me: Entry, address: str, timeout_s: float) -> list[Entry]:
    """Wait until all processes have said who they are; the list of them, by index.

    Args:
      me: this process.
      address: "host:port" of process 0.
      timeout_s: how long this process waits for the others.

    Raises:
      StartError: a process did not arrive (all who did get the names of those who did not), or went away again; two
        have the same index; counts or code differ; the port of process 0 is taken.
    """
    if me.num_processes == 1:
        _listen(address).close()
        return [me]
    if me.process_index == 0:
        return _Roll(me, address, timeout_s).take()
    return _answer(me, address, timeout_s)


class _Roll:
    """Process 0's side."""

    def __init__(self, me: Entry, address: str, timeout_s: float):
        self.me, self.address, self.timeout_s = me, address, timeout_s
        self.entries = {0: me}
        self.connections: dict[socket.socket, bytes] = {}  # what was read so far
        self.named: dict[socket.socket, Entry] = {}

    def take(self) -> list[Entry]:
        deadline = time.monotonic() + self.timeout_s
        with _listen(self.address) as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while len(self.entries) < self.me.num_processes:
                    events = selector.select(max(0.0, deadline - time.monotonic()))
                    if not events and time.monotonic() >= deadline:
                        raise StartError(self._missing())
                    for key, _ in events:
                        if key.fileobj is listener:
                            connection, _ = listener.accept()
                            connection.setblocking(False)
                            self.connections[connection] = b""
                            selector.register(connection, selectors.EVENT_READ)
                        elif isinstance(key.fileobj, socket.socket) and not self._read(key.fileobj):
                            selector.unregister(key.fileobj)
                            del self.connections[key.fileobj]
                            key.fileobj.close()
                entries = [self.entries[i] for i in range(self.me.num_processes)]
                _check_code(entries)
            except StartError as error:
                self._tell({"error": str(error)})
                raise
            self._tell({"entries": [asdict(entry) for entry in entries]})
            return entries

    def _read(self, connection: socket.socket) -> bool:
        """Take what has arrived; False if the connection is of no use."""
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data and connection in self.named:
            raise StartError(
                f"starting {self.me.num_processes} processes: {self.named[connection]} arrived and ended again before "
                f"all were there. Look at the end of its log."
            )
        text = self.connections[connection] = self.connections[connection] + data
        if data and b"\n" not in text:
            return len(text) < _MAX_BYTES
        try:
            entry = Entry(**json.loads(text.partition(b"\n")[0]))
        except (ValueError, TypeError):
            return False  # not one of us
        self.named[connection] = entry
        self._check(entry)
        self.entries[entry.process_index] = entry
        return True

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

    def _missing(self) -> str:
        missing = [i for i in range(self.me.num_processes) if i not in self.entries]
        shown = ", ".join(map(str, missing[:20])) + (
            f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        )
        arrived = ", ".join(str(entry) for _, entry in sorted(self.entries.items())[:20])
        host = split_address(self.address)[0]
        hint = f" Other hosts cannot reach {host}." if is_loopback(host) else ""
        return (
            f"starting {self.me.num_processes} processes: process {shown} did not arrive at {self.address} within "
            f"{self.timeout_s:g} s; arrived: {arrived}.{hint} Look at the end of the logs of the missing, check that "
            f"their hosts can reach that address, or raise initialization_timeout_s."
        )

    def _tell(self, answer: dict[str, Any]) -> None:
        for connection in self.connections:
            try:
                connection.setblocking(True)
                connection.settimeout(_ANSWER_S)
                connection.sendall(json.dumps(answer).encode() + b"\n")
                connection.close()
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
            f"Another run may hold it: choose another port (MASTER_PORT)."
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


def _answer(me: Entry, address: str, timeout_s: float) -> list[Entry]:
    """The side of every process but 0."""
    deadline = time.monotonic() + timeout_s
    problem = "no connection"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(split_address(address), timeout=5) as connection:
                if connection.getsockname() == connection.getpeername():
                    raise ConnectionRefusedError("connected to itself")  # the kernel chose that very port
                connection.sendall(json.dumps(asdict(me)).encode() + b"\n")
                connection.settimeout(timeout_s + _ANSWER_S)
                answer = _read_answer(connection)
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            if answer is not None and "error" in answer:
                raise StartError(answer["error"])
            if answer is not None:
                return [Entry(**entry) for entry in answer["entries"]]
            problem = "something else answers there, or process 0 ended"
        time.sleep(_RETRY_S)
    raise StartError(
        f"starting as {me} of {me.num_processes}: process 0 did not answer at {address} within {timeout_s:g} s "
        f"({problem}). Look at the end of its log, check that it runs on that host and that the port is open, or raise "
        f"initialization_timeout_s."
    )


def _read_answer(connection: socket.socket) -> dict[str, Any] | None:
    with connection.makefile("rb") as file:
        try:
            answer = json.loads(file.readline())
        except ValueError:
            return None
    return answer if isinstance(answer, dict) and {"error", "entries"} & set(answer) else None
