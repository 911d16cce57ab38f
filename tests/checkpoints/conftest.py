"""What the tests of saving share."""

import threading

import pytest

from zero2jax.checkpoints import orbax_handler


@pytest.fixture
def may_write(monkeypatch):
    """An event: until it is set, the threads of saves wait before they write."""
    event, write = threading.Event(), orbax_handler.write_process_file

    def write_when_allowed(folder, leaves):
        assert event.wait(60)
        write(folder, leaves)

    monkeypatch.setattr(orbax_handler, "write_process_file", write_when_allowed)
    return event
