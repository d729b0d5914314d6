"""Threads in the place of processes, for code that exchanges values between processes."""

import threading

import jax
import pytest

PATIENCE = 60  # seconds after which a thread that waits for the other raises an error


@pytest.fixture
def together(monkeypatch):
    """Calls two functions, each as a process of its own, and returns the texts of their errors."""
    barrier, local = threading.Barrier(2, timeout=PATIENCE), threading.local()
    values = [None, None]

    def exchange(topic, value, **_):
        values[local.process] = (topic, value)
        barrier.wait()
        topics, actual = zip(*values, strict=True)
        barrier.wait()
        assert topics[0] == topics[1]
        return list(actual)

    for module in (
        "distributed._agreement",
        "distributed._kv_store",
        "checkpoint._shared_directory",
    ):
        monkeypatch.setattr(f"redcoast.{module}.exchange", exchange)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: local.process)

    def call(*functions):
        errors = ["", ""]

        def run(process):
            local.process = process
            try:
                functions[process]()
            except ValueError as error:
                errors[process] = str(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    return call
