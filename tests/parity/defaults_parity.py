"""Settings that a file leaves out have the default values of `transformers`."""

# pyright: reportMissingImports=false

import dataclasses
import json

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from redcoast.pretrained._registry import FAMILIES, find_family
from redcoast.pretrained._text_part import WRAPPERS

TYPES = [name for family in FAMILIES for name in family.types if name in CONFIG_MAPPING]
# Their tensors say whether a head is tied, where their settings do not. Lengths are not enforced.
NOT_COMPARED = ("tied", "context")


def settings_of(config):
    """The settings as a file has them."""
    return json.loads(json.dumps(config.to_dict())) | {"model_type": config.model_type}


def compare(full, short):
    _, expected = find_family(full, "full")
    _, config = find_family(short, "short")
    differing = [
        field.name
        for field in dataclasses.fields(expected)
        if getattr(expected, field.name) != getattr(config, field.name)
    ]
    assert sorted({*differing} - {*NOT_COMPARED}) == []


# What no file leaves out, and types whose defaults describe no model that is implemented.
NOT_LEFT_OUT = {"kimi_k25": "sizes", "qwen3_vl_moe": "the number of experts"}
REFUSED = ("vision-encoder-decoder", "dinov3_vit", "glm4_moe", "granitemoehybrid")


@pytest.mark.parametrize("kind", [kind for kind in WRAPPERS if kind not in NOT_LEFT_OUT])
def test_of_a_language_model_within_another_one(kind):
    full = settings_of(CONFIG_MAPPING[kind](text_config={}))
    compare(full, {"model_type": kind, "text_config": {}})


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in REFUSED])
def test_of_a_model_by_itself(kind):
    """All that a file may leave out; sizes without which no file is read stay."""
    full = settings_of(CONFIG_MAPPING[kind]())
    short = {"model_type": kind}
    for _ in full:
        try:
            find_family(short, "short")
            break
        except ValueError as error:
            short |= {x: full[x] for x in full if f"`{x}` is missing" in str(error)}
    compare(full, short)
