"""Where things are in this repository."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
FIXTURES = ROOT / "tests" / "fixtures"
HELPERS = ROOT / "tests" / "helpers"
