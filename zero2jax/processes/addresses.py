"""The coordinator's address, "host:port": written, read, and checked for what cannot be reached. Pure functions."""

import ipaddress
import re
from collections.abc import Mapping

DEFAULT_PORT = 29500  # torchrun's and DeepSpeed's


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def checked_port(port: int, said: str) -> int:
    """`port`, if it can be one; `said` is where it was read.

    Raises:
      ValueError: it is not from 1 to 65535.
    """
    if not 0 < port < 65536:
        raise ValueError(
            f"reading {said}: a port is a number from 1 to 65535, and this is {port}. Choose another."
        )
    return port


def split_address(address: str) -> tuple[str, int]:
    """(host without brackets, port).

    Raises:
      ValueError: there is no port, or no host, or the port is not from 1 to 65535.
    """
    host, port = parse_coordinator(address)
    if port is None:
        raise ValueError(
            f"reading the coordinator's address {address!r}: write host:port, as in node001:29500; an IPv6 address in "
            f"brackets, [fd00::1]:29500."
        )
    return host, port


def parse_coordinator(text: str) -> tuple[str, int | None]:
    """(host without brackets, port or None) of "host", "host:port", an IPv6 address, or one in brackets with a port.

    Raises:
      ValueError: there is no host, or the port is no number from 1 to 65535.
    """
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]\s]+))(?::(?P<port>[0-9]{1,5}))?", text)
    if match is None and _is_ipv6(text):
        return text, None
    port = match["port"] if match else None
    wrong = match is None or (match["v6"] is not None and not _is_ipv6(match["v6"]))
    if match is None or wrong or (port is not None and not 0 < int(port) < 65536):
        raise ValueError(
            f"reading the coordinator {text!r}: write HOST or HOST:PORT with a port from 1 to 65535, as in "
            f"node001:29500; an IPv6 address with a port in brackets, [fd00::1]:29500."
        )
    return match["v6"] or match["host"], None if port is None else int(port)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only processes of the same host can reach it: `localhost`, 127.0.0.0/8, ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def grpc_proxy(host: str, env: Mapping[str, str]) -> str | None:
    """The variable by which gRPC would use a proxy to reach `host`, if any.

    gRPC reads the lower-case names only. Entries of `no_proxy` are ends of host names, or networks as 10.0.0.0/8.
    """
    name = next((n for n in ("grpc_proxy", "https_proxy", "http_proxy") if env.get(n)), None)
    excepted = env.get("no_grpc_proxy") or env.get("no_proxy") or ""
    entries = [entry.strip().lower() for entry in excepted.split(",")]
    return None if any(entry and _excepts(entry, host.lower()) for entry in entries) else name


def _excepts(entry: str, host: str) -> bool:
    if host.endswith(entry):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
