"""The packages of the extra `serve`."""

import importlib.util

SERVER = ("jinja2", "starlette", "tokenizers", "uvicorn")


def require_extra(*packages: str) -> None:
    """Raises an `ImportError` with the command that installs packages, if one is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"The server needs {' and '.join(missing)}. Install what is missing with "
            '`pip install "redcoast[serve]"`.'
        )
