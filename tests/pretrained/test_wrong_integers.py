"""Each integer of each family's files, replaced by one that is wrong: loaded or refused, soon."""

import json
import resource

import pytest
from test_save_pretrained import FAMILIES, make

import redcoast as rc

WRONG = (10**7, 10**12, 2**63, 0, -1)
MEMORY = 300  # MB that an attempt may add to the peak
LONGEST = 3000  # letters of a message


def integer_places(value, path=()):
    """The path of each integer in a file, nested ones too."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return [path] if isinstance(value, int) and not isinstance(value, bool) else []
    return [place for key, inner in items for place in integer_places(inner, (*path, key))]


def replaced(text, path, value):
    settings = json.loads(text)
    inner = settings
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(settings)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # MB


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_integer_takes_no_memory(family, tmp_path):
    model_class, config = FAMILIES[family]
    rc.save_pretrained(make(model_class, config), tmp_path / "model")
    tried = 0
    for file in (tmp_path / "model").glob("*config.json"):
        text = file.read_text()
        for path in integer_places(json.loads(text)):
            for value in WRONG:
                file.write_text(replaced(text, path, value))
                before, message = peak(), "loaded"
                try:
                    rc.load_pretrained(tmp_path / "model")
                except (ValueError, TypeError) as error:
                    message = str(error)
                assert 0 < len(message) < LONGEST
                assert peak() - before < MEMORY, (file.name, path, value)
                tried += 1
        file.write_text(text)
    assert tried > 20
