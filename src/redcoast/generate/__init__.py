"""Text generation with a key-value cache: greedy decoding, sampling and beam search.

A model reads its prompt once, and then one token at a time, in a compiled loop. `_generate.py` has
the public function; the others are imported on its first call.
"""

from ._generate import generate as generate
from ._generated import Generated as Generated
from ._log_probabilities import log_probabilities as log_probabilities
