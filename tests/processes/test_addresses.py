"""Addresses as written, and proxies as gRPC reads them."""

import pytest

from zero2jax.processes.addresses import grpc_proxy, is_loopback, split_address


# As seen with jax 0.12.0.1: a proxy of the upper-case name, or of all_proxy, is not used; `no_proxy=*` excepts nothing.
@pytest.mark.parametrize(
    ("env", "proxy"),
    [
        ({"HTTP_PROXY": "p", "all_proxy": "p"}, None),
        ({"http_proxy": "p"}, "http_proxy"),
        ({"grpc_proxy": "p", "no_proxy": "*"}, "grpc_proxy"),
        ({"https_proxy": "p", "no_proxy": "10.0.0.1, .0.0.1"}, None),
        ({"https_proxy": "p", "no_proxy": "127.0.0.0/8"}, None),
        ({"https_proxy": "p", "no_proxy": "127.0.0.1", "no_grpc_proxy": "other"}, "https_proxy"),
    ],
)
def test_proxies_are_read_as_grpc_reads_them(env, proxy):
    assert grpc_proxy("127.0.0.1", env) == proxy


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert is_loopback("127.1.2.3")
    assert not is_loopback("node1")
    assert not is_loopback("10.0.0.1")
