"""What `transformers` computed in every case, by name; `parity/make_fixtures.py` writes it."""

import gzip
import itertools as it
import json

from paths import FIXTURES

FILES = sorted(FIXTURES.glob("*.json.gz"))
STORED_OUTPUTS = dict(
    it.chain(*(json.loads(gzip.decompress(file.read_bytes())).items() for file in FILES))
)
