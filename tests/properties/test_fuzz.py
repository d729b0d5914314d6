"""Files with random damage are read, or refused in a sentence; soon, and in little memory."""

import subprocess
import sys

import pytest
from paths import HELPERS


@pytest.mark.parametrize(
    ("seconds", "seed"),
    [
        pytest.param(2, 1, marks=pytest.mark.integration),
        pytest.param(600, None, marks=pytest.mark.fuzz),
    ],
)
def test_damaged_files(seconds, seed):
    arguments = [str(seconds)] if seed is None else [str(seconds), str(seed)]
    command = [sys.executable, "fuzz_readers.py", *arguments]
    result = subprocess.run(
        command,
        cwd=HELPERS,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds + 900,
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert int(result.stdout.split()[-5]) > 10
