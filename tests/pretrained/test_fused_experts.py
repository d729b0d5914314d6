"""Files that have the matrices of all experts in one tensor, as they are or transposed."""

import jax
import numpy as np
import pytest
from random_models import random_model
from safetensors.numpy import load_file, save_file

import redcoast as rc
from redcoast.models import Mixtral, MixtralConfig

CONFIG = MixtralConfig(
    vocab=24, width=16, layers=2, heads=4, kv_heads=2, hidden=6, experts=4, qk_norm=True
)


def fused(tensors, *, turned):
    """The tensors of a file, with two for all experts of a layer."""
    turn = (lambda x: np.ascontiguousarray(x.swapaxes(1, 2))) if turned else (lambda x: x)
    others = {name: x for name, x in tensors.items() if ".experts." not in name}
    for layer in range(CONFIG.layers):
        base = f"model.layers.{layer}.mlp.experts"
        stack = lambda part, base=base: np.stack(
            [tensors[f"{base}.{i}.{part}_proj.weight"] for i in range(CONFIG.experts or 0)]
        )
        both = np.concatenate([stack("gate"), stack("up")], axis=1)
        others |= {f"{base}.gate_up_proj": turn(both), f"{base}.down_proj": turn(stack("down"))}
    return others


@pytest.mark.thorough
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.few("True")
def test_experts_in_one_tensor_are_read(turned, tmp_path):
    model = Mixtral(CONFIG, key=jax.random.key(0))
    rc.save_pretrained(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(fused(load_file(file), turned=turned), file)
    for mesh in (None, rc.make_mesh(data=2, model=4)):
        loaded = rc.load_pretrained(tmp_path, mesh=mesh)
        assert jax.tree.all(jax.tree.map(np.array_equal, loaded, model))


@pytest.mark.thorough
def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path):
    rc.save_pretrained(random_model(Mixtral, CONFIG), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = fused(load_file(file), turned=False)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file(tensors | {name: tensors[name][:, 1:]}, file)
    with pytest.raises(ValueError, match=rf"Unexpected: {name}"):
        rc.load_pretrained(tmp_path)
