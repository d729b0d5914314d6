"""Files of JSON that strangers may have written."""

import json
from pathlib import Path
from typing import Any

# An index of a hundred thousand tensors is ten times smaller.
MOST_BYTES = 2**27


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    **Raises:**

    `ValueError` that names the file if it holds no object of JSON, is larger than 128 MiB or is
    nested too deeply; `OSError` if it cannot be opened.
    """
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES >> 20} MiB, too large for settings.")
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is damaged, or no JSON: {error}.") from error
    except RecursionError:
        # Not as the cause, which would be a traceback of a thousand lines.
        raise ValueError(f"{path} is nested too deeply to be JSON of settings.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, and no object of JSON.")
    return found
