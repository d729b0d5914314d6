"""Measures what training steps send between devices."""

import os
import sys
from pathlib import Path

# Silences the compiler's warnings about full all-gathers, which are counted here. It reads this
# when JAX is first imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

sys.path.insert(0, str(Path(__file__).parents[2]))  # of `_cells`
