"""The examples in the docstrings of the losses."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from redcoast import losses

# These have a function of a model as their example.
OF_MODELS = {"cross_entropy", "chunked_cross_entropy", "pairwise_sigmoid"}
OF_MODELS |= {"token_log_probabilities"}
NAMES = {name for name, x in vars(losses).items() if inspect.isfunction(x)} - OF_MODELS


@pytest.mark.few("kto")
@pytest.mark.parametrize("name", sorted(NAMES))
def test_example_of_a_loss_runs(name):
    text = inspect.cleandoc(getattr(losses, name).__doc__)
    _, _, example = text.partition("```python")
    source = inspect.cleandoc(example.partition("```")[0])
    namespace = {"jax": jax, "jnp": jnp}
    exec(source, namespace)
    result = next(namespace[x] for x in ("loss", "advantages", "estimates") if x in namespace)
    assert np.isfinite(np.asarray(result)).all()
