"""Writes `tests/fixtures`: what `transformers` computes in every case, for tests without it.

Run in the environment of `nox -s parity`: `python tests/parity/make_fixtures.py`.
"""

# pyright: reportMissingImports=false

import gzip
import importlib
import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import numpy as np
import torch
from harness import Case, batch_for, make_reference, reference_outputs, takes_pixels
from published import sample, settings_of, shapes_of

FOLDER = Path(__file__).parents[1] / "fixtures"


def make_fixture(case: Case) -> dict:
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        reference = make_reference(case, directory := Path(name))
        rows = reference_outputs(reference, batch_for(reference, directory))
        return {
            "settings": settings_of(directory),
            "tensors": shapes_of(directory),
            "pixels": takes_pixels(reference),
            "text": reference.can_generate(),
            "outputs": np.round([sample(row.double().numpy()) for row in rows], 6).tolist(),
        }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file in sorted(Path(__file__).parent.glob("*_parity.py")):
        module = importlib.import_module(file.stem)
        cases = [*getattr(module, "CASES", ()), *getattr(module, "PAIRS", ())]
        fixtures = {case.name: make_fixture(case) for case in cases}
        path = FOLDER / f"{file.stem.removesuffix('_parity')}.json.gz"
        if fixtures:
            path.write_bytes(gzip.compress(json.dumps(fixtures).encode(), mtime=0))


if __name__ == "__main__":
    main()
