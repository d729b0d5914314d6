"""Every type that `transformers` has as a causal model is supported, or refused with the reason."""

# pyright: reportMissingImports=false

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from redcoast.pretrained._registry import FAMILIES
from redcoast.pretrained._text_part import WRAPPERS
from redcoast.pretrained._unsupported import FEATURE_OF, OTHER_NAMES


def test_every_type_is_supported_or_refused_with_a_reason():
    supported = {name for family in FAMILIES for name in family.types} | WRAPPERS.keys()
    unknown = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - supported - FEATURE_OF.keys() - OTHER_NAMES
    assert sorted(unknown) == []
