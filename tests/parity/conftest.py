"""As in the other tests, but quicker to compile, and with libraries that may warn."""

import os

# Of what a session takes, most is the compiler's time, and half of that goes to making fast code.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"


def pytest_configure(config):
    for library in ("torch", "transformers", "huggingface_hub"):
        config.addinivalue_line("filterwarnings", rf"ignore:::{library}\..*")
