"""The compilation cache is shared by processes that run at the same time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CHEAP = "tests/core/test_jaxpr.py"


def run_tests(cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", CHEAP]
    kept = {f"JAX_PERSISTENT_CACHE_MIN_{x}": "0" for x in ("COMPILE_TIME_SECS", "ENTRY_SIZE_BYTES")}
    environment = os.environ | kept | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.integration
def test_an_entry_that_another_process_is_writing_fails_no_test(tmp_path):
    assert run_tests(tmp_path).returncode == 0
    entries = [x for x in tmp_path.iterdir() if x.name.endswith("-cache")]
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:100])
    again = run_tests(tmp_path)
    assert again.returncode == 0, again.stdout
