"""Metadata that depends on the project's address, `[tool.redcoast] address` in `pyproject.toml`.

With an address, packages link to it, and the links of the README, which are relative, are made
absolute. Without one, packages have no links, and the README has its words alone.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)\n*")
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


class AddressHook(MetadataHookInterface):
    """Fills in `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
        address = project["tool"]["redcoast"]["address"].rstrip("/")
        text = absolute_links((root / "README.md").read_text("utf-8"), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls(address)


def urls(address: str) -> dict[str, str]:
    """The links of the project's page on a package index."""
    if not address:
        return {}
    changelog = f"{address}/blob/main/docs/changelog.md"
    return {"Source": address, "Issues": f"{address}/issues", "Changelog": changelog}


def absolute_links(text: str, address: str) -> str:
    """The README as it is shown elsewhere than in the repository."""
    if not address:
        return LINK.sub(r"\1", IMAGE.sub("", text))
    text = IMAGE.sub(lambda found: f"![{found[1]}]({address}/raw/main/{found[2]})\n\n", text)
    return LINK.sub(lambda found: f"[{found[1]}]({address}/blob/main/{found[2]})", text)


def get_metadata_hook() -> type[MetadataHookInterface]:
    return AddressHook
