"""The coordinator's address, "host:port": written, read, and checked for what cannot be reached. Pure functions."""

import ipaddress
import re
from collections.abc import Mapping

DEFAULT_PORT = 29500  # torchrun's and DeepSpeed's


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """(host without brackets, port).

    Raises:
      ValueError: there is no port.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(
            f"reading the coordinator's address {address!r}: write host:port, as in node001:29500."
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_coordinator(text: str) -> tuple[str, int | None]:
    """(host without brackets, port or None) of "host", "host:port", an IPv6 address, or one in brackets with a port.

    Raises:
      ValueError: there is no host, or the port is no number from 1 to 65535.
    """
    match = re.fullmatch(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]\s]+))(?::(?P<port>\d+))?", text)
    if match is None and text.count(":") > 1 and not set(text) & set("[] "):
        return text, None  # a bare IPv6 address
    port = match["port"] if match else None
    if match is None or (port is not None and not 0 < int(port) < 65536):
        raise ValueError(
            f"reading the coordinator {text!r}: write HOST or HOST:PORT with a port from 1 to 65535, as in "
            f"node001:29500; an IPv6 address with a port in brackets, [fd00::1]:29500."
        )
    return match["v6"] or match["host"], None if port is None else int(port)


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
