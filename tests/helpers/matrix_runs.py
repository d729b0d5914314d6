"""Runs of optimizers of matrices, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np

import redcoast as rc


def assert_mesh_changes_no_result(optimizer, params, *, steps):
    """Also that the matrices `up` have changed."""

    # Gradients of full rank: the eigenvectors of others are not determined.
    def linear_loss(params, x, key):
        return jnp.mean(x @ jnp.concatenate([p.reshape(-1) for p in jax.tree.leaves(params)]))

    size = sum(x.size for x in jax.tree.leaves(params))
    rows = np.random.default_rng(3).normal(size=(64, size)).astype(np.float32)
    models = []
    for mesh in (rc.make_mesh(devices=jax.devices()[:1]), rc.make_mesh(data=2, fsdp=4)):
        state = rc.fit(
            params, optimizer, list(rows), loss_fn=linear_loss, collate_fn=np.stack, batch_size=16,
            steps=steps, mesh=mesh, log=None, key=jax.random.key(0),
        )  # fmt: skip
        models.append(state.model)
    alone, divided = models
    for name in params:
        np.testing.assert_allclose(alone[name], divided[name], atol=1e-4)
    assert np.abs(alone["up"] - params["up"]).max() > 0.02
