"""Windows of a memory map of tokens, and sources of any length, take no more time or memory."""

import tracemalloc

import jax
import numpy as np
import pytest

import redcoast as rc

KEY = jax.random.key(0)


def test_windows_of_several_files(tmp_path):
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    parts = [np.memmap(tmp_path / "a.bin", np.uint16, "r"), np.arange(3), np.arange(50, 57)]
    windows = rc.token_windows(parts, 4, stride=3)
    rows = [window.tolist() for window in windows]
    assert rows == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [50, 51, 52, 53], [53, 54, 55, 56]]
    assert windows[-1].tolist() == rows[-1]
    assert windows[0].dtype == np.int32  # sums of 16 bits would overflow
    assert len(rc.token_windows(parts[0], 4)) == 2
    with pytest.raises(IndexError, match="5 windows, and none at 5"):
        windows[5]


class Counted:
    """As many examples as asked, of which it notes which are read."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.read.append(i)
        return np.array([i % 1000], np.float32)


@pytest.mark.parametrize("length", [1_000, 2_000_000_000])
def test_the_first_batch_and_a_resume_read_only_their_examples(length):
    """Also in the middle of a shuffled epoch of billions, and with a few kilobytes."""
    examples = Counted(length)
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    options = {"batch_size": 8, "key": KEY, "epochs": 4, "mesh": mesh, "workers": 0}
    tracemalloc.start()
    data = rc.batches(examples, np.stack, **options)
    assert next(data).step == 1
    step = 3 * length // 16
    data.set_state({"step": step, "position": 8 * step})
    assert next(data).step == step + 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000
    assert len(examples.read) <= 4 * 8  # the batch and the one after it, twice
    assert len(set(examples.read)) > 24
    assert max(examples.read) > length // 2


def test_windows_of_a_sparse_file_larger_than_memory(tmp_path):
    """Four thousand million tokens, in a file that takes no space."""
    path = tmp_path / "tokens.bin"
    with open(path, "wb") as file:
        file.truncate(8 * 10**9)
    windows = rc.token_windows(np.memmap(path, np.uint16, "r"), 2, stride=1)
    assert len(windows) == 4 * 10**9 - 1
    data = rc.batches(windows, np.stack, batch_size=8, key=KEY, steps=2)
    assert [batch.arrays.shape for batch in data] == [(8, 2), (8, 2)]
