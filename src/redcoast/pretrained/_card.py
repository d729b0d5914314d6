"""The model card of a directory, `README.md` with front matter in YAML."""

import json
from collections.abc import Mapping
from typing import Any

from ._settings import Settings

CARD = "README.md"
# The keys of the front matter, for Hugging Face's hub. Other facts are in the text.
FRONT = ("base_model", "datasets", "language", "license", "license_link", "license_name", "metrics")
FRONT += ("pipeline_tag", "tags")
# The hub's task, by the end of the name of an architecture. A card may state another.
_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "VisionEncoderDecoderModel": "image-to-text",
}


def make_card(facts: Mapping[str, Any], settings: Settings, name: str, parameters: int) -> str:
    """Returns a model card with `facts` about a model (see `save_pretrained`), the settings of its
    `config.json`, the name of its directory and the number of its parameters."""
    architecture = (settings.get("architectures") or ["model"])[0]
    front: dict[str, object] = {"library_name": "transformers"}
    for ending, task in _TASKS.items():
        if architecture.endswith(ending):
            front["pipeline_tag"] = task
    for key in FRONT:
        if key in facts:
            front[key] = facts[key]
    front["tags"] = [*facts.get("tags", ()), "redcoast"]
    lines = ["---"]
    for key, value in front.items():
        lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")  # JSON is valid YAML
    lines += ["---", "", f"# {name}", ""]
    lines += [f"`{architecture}` with {parameters:,} parameters, saved by `redcoast`.", ""]
    rows = []
    for key, value in facts.items():
        if key not in FRONT:
            text = str(value)
            if isinstance(value, float):
                text = f"{value:.6g}"
            rows.append(f"| {_cell(key.replace('_', ' '))} | {_cell(text)} |")
    if rows:  # a table without headings
        lines += ["## Training", "", "| | |", "| --- | --- |", *rows, ""]
    lines += ["## Intended uses and limitations", "", "Not described yet.", ""]
    return "\n".join(lines)


def check_card(card: object) -> None:
    """Raises if a card is not a mapping from names to values that JSON supports."""
    if not isinstance(card, Mapping) or not all(isinstance(key, str) for key in card):
        raise TypeError(
            f"`card` is of type {type(card).__name__}. It must be a mapping from names to facts, "
            'such as `{"license": "apache-2.0", "steps": 100}`.'
        )
    for key in FRONT:
        value = card.get(key, [])
        is_text = isinstance(value, str) and key != "tags"
        is_list = isinstance(value, list) and all(isinstance(x, str) for x in value)
        if not (is_text or is_list):
            kind = "a string, or a list of strings"
            if key == "tags":
                kind = "a list of strings"
            raise TypeError(f"`card` has {key!r}: {value!r}. It must be {kind}.")


def _cell(text: str) -> str:
    # A bar or a line break would end the cell.
    return " ".join(text.replace("|", "\\|").split())
