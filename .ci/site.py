"""Links the site to the project's address, which only `pyproject.toml` has."""

import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Fills in the address of the repository, if there is one."""
    project = tomllib.loads(Path(config.config_file_path).with_name("pyproject.toml").read_text())
    config.repo_url = project["tool"]["redcoast"]["address"] or None
    return config
