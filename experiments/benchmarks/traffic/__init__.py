"""Measures what training steps send between devices."""

import os

# The compiler warns where it copies an array whole, which is what is counted here. It reads this
# when JAX is first imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
