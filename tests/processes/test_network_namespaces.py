"""Two network namespaces as two hosts, each with a name and an address of its own: the hostfile path for real.

Needs Linux, root and `ip`; skips elsewhere, with the reason.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from spawn import environment, results, write_program

pytestmark = pytest.mark.network_namespaces

ADDRESSES = {"z2j-a": "10.211.7.1", "z2j-b": "10.211.7.2"}
# A host's namespaces of network and name; `ip netns exec` puts its /etc/hosts in place.
SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 255
exec ip netns exec "$3" unshare --uts sh -c "hostname $3 && $4"
"""
PROGRAM = """
import json, socket
import jax, numpy as np, zero2jax

startup = zero2jax.init_distributed(initialization_timeout_s=120)
mesh = zero2jax.make_mesh()
batch = zero2jax.global_batch(np.float32([startup.process_index + 1] * jax.local_device_count()), mesh)
total = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))(batch)
found = {"host": socket.gethostname(), "total": float(total), "coordinator": startup.coordinator_address}
print(json.dumps(found), flush=True)
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts(tmp_path):
    """The environment in which `ssh` reaches the two hosts."""
    folders = [Path("/etc/netns") / name for name in ADDRESSES]
    try:
        for name, folder in zip(ADDRESSES, folders, strict=True):
            ip("netns", "add", name)
            folder.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in ADDRESSES.items())]
            (folder / "hosts").write_text("\n".join(lines) + "\n")
        first, second = ADDRESSES
        ip("link", "add", "z2j0", "netns", first, "type", "veth", "peer", "name", "z2j0", "netns", second)
        for name, address in ADDRESSES.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "z2j0")
            ip("-n", name, "link", "set", "z2j0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        ssh = tmp_path / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        yield environment(PATH=f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', None) or error}")
    finally:
        for name, folder in zip(ADDRESSES, folders, strict=True):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                (folder / "hosts").unlink(missing_ok=True)
                folder.rmdir()
                ip("netns", "del", name)


def test_hosts_of_a_hostfile_compute_together(hosts, tmp_path):
    (tmp_path / "hosts").write_text("".join(f"{name} slots=2\n" for name in ADDRESSES))
    words = ["--hostfile", str(tmp_path / "hosts"), "--platform", "cpu", "--processes", "1"]
    program = write_program(tmp_path, PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "zero2jax", "launch", *words, str(program)],
        env=hosts,
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines()]  # without the host's prefix
    done.stdout = "\n".join(lines)
    found = results(done)
    assert {i: rows[0]["host"] for i, rows in found.items()} == dict(enumerate(ADDRESSES))
    assert all(rows[0]["total"] == 6.0 for rows in found.values())  # 2 devices * 1 + 2 devices * 2
    assert found[1][0]["coordinator"] == "z2j-a:29500"
