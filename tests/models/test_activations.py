"""Activation functions against their definitions."""

import math

import numpy as np
import pytest
from random_models import to_device

from redcoast.models._basic import ACTIVATIONS, check_activation

X = np.linspace(-4, 4, 41)
SIGMOID = 1 / (1 + np.exp(-X))
GELU = X / 2 * (1 + np.vectorize(math.erf)(X / np.sqrt(2)))
GELU_TANH = X / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)))
EXPECTED = {
    **dict.fromkeys(("gelu", "gelu_python"), GELU),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), GELU_TANH),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), GELU_TANH),
    "quick_gelu": X / (1 + np.exp(-1.702 * X)),
    "relu": np.maximum(X, 0),
    "relu2": np.maximum(X, 0) ** 2,
    **dict.fromkeys(("silu", "swish"), X * SIGMOID),
    "tanh": np.tanh(X),
}


def test_all_are_as_defined():
    assert EXPECTED.keys() == ACTIVATIONS.keys()
    for name, expected in EXPECTED.items():
        actual = ACTIVATIONS[name](to_device(X, np.float32))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6, err_msg=name)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="function 'gelu_10'. Supported functions: 'gelu', "):
        check_activation("gelu_10")
