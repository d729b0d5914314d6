"""How the options of `generate` follow from the configuration of a model."""

from types import SimpleNamespace

import pytest

import redcoast as rc
from redcoast.generate._request import choose_decoding


def test_a_configuration_without_defaults_decodes_greedily():
    assert choose_decoding(SimpleNamespace(decoding=None), None, {}, None) == rc.Decoding()


def test_defaults_of_another_type_are_named():
    with pytest.raises(TypeError, match=r"model\.config\.decoding"):
        choose_decoding(SimpleNamespace(decoding={"beams": 2}), None, {}, None)
