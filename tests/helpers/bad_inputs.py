"""Bad inputs to the public functions, each with the words that the error must have.

`python bad_inputs.py DIRECTORY` runs them as a user does, without the type checker of the tests,
and prints for each what was raised and how many programs were compiled before.
"""

import json
import sys
from pathlib import Path

import bad_models
import bad_plans
import bad_training
import jax

# By function: what is called with a directory, the error, and the words.
ROWS = bad_plans.ROWS | bad_training.ROWS | bad_models.ROWS


COMPILED: list[str] = []


def note(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(event)


def run(call, directory):
    directory.mkdir(parents=True)
    COMPILED.clear()
    try:
        call(directory)
    except Exception as error:
        actual = [type(error).__name__, [c.__name__ for c in type(error).__mro__], str(error)]
    else:
        actual = ["nothing", [], ""]
    return [*actual, len(COMPILED)]


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.monitoring.register_event_duration_secs_listener(note)
    results = {
        name: [
            run(row[0], Path(sys.argv[1]) / name.replace(" ", "_") / str(i))
            for i, row in enumerate(rows)
        ]
        for name, rows in ROWS.items()
    }
    print(json.dumps(results))
