"""Several processes save together, and one of them fails."""

import pytest
from processes import run_processes

SCRIPT = """
import logging, os, pathlib, resource, sys, time
import redcoast as rc
rc.initialize()
import jax, optax
from problem import collate_fn, loss_fn, make_examples, make_model

directory, broken = pathlib.Path(sys.argv[1]), int(sys.argv[2])

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("redcoast").addHandler(handler)
printed, nothing = os.dup(1), os.open("/dev/null", os.O_WRONLY)

def limit(most):
    for number in (1, 2):  # the output goes to a file, whose size is limited too
        os.dup2(nothing if most == 500 else printed, number)
    if jax.process_index() == broken:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

def train(steps):
    return rc.fit(
        make_model(width=64), optax.adam(1e-3), make_examples(64), collate_fn=collate_fn,
        loss_fn=loss_fn, batch_size=16, steps=steps, mesh=rc.make_mesh(data=1, fsdp=2),
        checkpoints=rc.Checkpoints(directory, every=2, keep=2), log=False,
    )

train(2)
began = time.monotonic()
limit(500)
try:
    train(6)
except rc.CheckpointNotSaved as error:
    limit(resource.RLIM_INFINITY)
    print(*messages, "NOT SAVED", error, sep="\\n")
limit(resource.RLIM_INFINITY)
print(f"after {time.monotonic() - began:.0f} seconds", flush=True)
assert int(train(8).step) == 8
print("at the end", sorted(p.name for p in (directory / "checkpoints").iterdir()))
"""


@pytest.mark.faults
@pytest.mark.parametrize("broken", [0, 1])
def test_one_process_that_cannot_save(tmp_path, broken):
    for finished in run_processes(SCRIPT, tmp_path, broken, processes=2):
        assert finished.returncode == 0, finished.output
        assert "The checkpoint of step 4 could not be saved" in finished.output
        assert "NOT SAVED\nThe final state, after step 6" in finished.output
        assert "at the end ['6', '8']" in finished.output
