"""What several processes ask each other: whether all say yes, and what each has."""

import socket

import numpy as np
from spawn import run_processes

from zero2jax.processes.agreement import all_agree, gather_with_hosts


def test_a_single_process_agrees_with_itself():
    assert all_agree(True) is True
    assert all_agree(False) is False
    rows, hosts = gather_with_hosts(np.arange(3))
    np.testing.assert_array_equal(rows, [[0, 1, 2]])
    assert hosts == (socket.gethostname()[:64],)


def test_one_process_that_says_no_is_heard_by_all():
    found = run_processes(
        """
        from zero2jax.processes.agreement import all_agree, gather_with_hosts
        answers = [all_agree(True), all_agree(index == 1), all_agree(False)]
        rows, hosts = gather_with_hosts(np.array(index + 0.5, np.float32))
        print(json.dumps([answers, rows.tolist(), hosts]))
        """,
        2,
    )
    host = socket.gethostname()[:64]
    assert found == [[[True, False, False], [0.5, 1.5], [host, host]]] * 2
