"""What holds for every decoder, whatever its layers are made of."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_models import to_device

import redcoast as rc
from redcoast.losses import cross_entropy


def make_tokens(config, shape=(3, 7)):
    return to_device(np.random.default_rng(0).integers(0, config.vocab, shape))


@eqx.filter_jit
def logits_of(model, tokens, **options):
    return model(tokens, **options)


def loss_of(model, tokens):
    return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])


gradient_of = eqx.filter_jit(eqx.filter_grad(loss_of))


def assert_close(found, expected, tolerance=1e-4):
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


def check_padding(model):
    """Padding on either side, whatever its token, changes nothing; gradients at padding alone are
    finite."""
    tokens = make_tokens(model.config)
    expected = logits_of(model, tokens)
    for before, behind in ((3, 0), (0, 3)):
        widths = ((0, 0), (before, behind))
        padded, mask = jnp.pad(tokens, widths, constant_values=5), jnp.pad(tokens * 0 + 1, widths)
        logits = logits_of(model, padded, mask=mask)
        assert_close(logits[:, before : before + 7], expected)
        assert jnp.all(jnp.isfinite(logits))
    empty = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(model(tokens, mask=tokens * 0))))
    assert all(jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(empty(model)))


def check_segments(model):
    """Texts packed into one row are as they would be in rows of their own."""
    tokens = make_tokens(model.config, (2, 9))
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2]] * 2)
    packed = logits_of(model, tokens, segments=segments)
    assert_close(packed[:, :4], logits_of(model, tokens[:, :4]))
    assert_close(packed[:, 4:], logits_of(model, tokens[:, 4:]))


def check_cache(model):
    """A left-padded prompt at once, then token by token, is as all at once."""
    tokens = make_tokens(model.config, (3, 10))
    mask = jnp.arange(10)[None] >= jnp.array([[0], [2], [4]])
    expected = logits_of(model, tokens, mask=mask)
    decode = eqx.filter_jit(lambda model, *args, **options: model.decode(*args, **options))
    hidden, cache = decode(model, tokens[:, :6], model.init_cache(3, 12), mask=mask[:, :6])
    found = [hidden]
    for i in range(6, 10):
        hidden, cache = decode(model, tokens[:, i : i + 1], cache)
        found.append(hidden)
    logits = model.unembed(jnp.concatenate(found, axis=1))
    assert_close(jnp.where(mask[..., None], logits - expected, 0), jnp.zeros(()))


def check_remat(make):
    """What is computed again in the backward pass changes no gradient, and less is saved."""
    tokens = make_tokens(make("none").config)

    def saved(model):
        _, pullback = eqx.filter_eval_shape(eqx.filter_vjp, lambda m: m(tokens), model)
        return sum(leaf.size for leaf in jax.tree.leaves(pullback) if hasattr(leaf, "size"))

    assert saved(make("full")) <= saved(make("dots")) < 0.8 * saved(make("none"))
    pair = [gradient_of(make(remat), tokens) for remat in ("none", "full")]
    for expected, found in zip(*map(jax.tree.leaves, pair), strict=True):
        assert_close(found, expected)


def check_split(model):
    """The planner splits nearly all parameters over `model`, and the loss is that of one device;
    the plan."""
    mesh = rc.make_mesh(data=2, model=4)
    tokens = make_tokens(model.config, (8, 8))
    plan = rc.plan_shardings(model, mesh, fn=loss_of, args=(tokens,))
    leaves, shardings = jax.tree.leaves(model), jax.tree.leaves(plan.shardings)
    split = [x.size for x, s in zip(leaves, shardings, strict=True) if "model" in str(s.spec)]
    assert sum(split) > 0.9 * sum(x.size for x in leaves), plan
    placed = jax.device_put((model, tokens), (plan.shardings, NamedSharding(mesh, P("data"))))
    loss = eqx.filter_jit(plan.constrain(loss_of))(*placed)
    np.testing.assert_allclose(loss, eqx.filter_jit(loss_of)(model, tokens), rtol=1e-5)
    return plan
