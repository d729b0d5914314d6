"""Warnings for losses that are not a mean over examples, or use one random mask for all of them."""

from collections.abc import Mapping, Sequence

from jaxtyping import PyTree

from ..core._errors import several
from ..core._frames import warn
from ..core._pytree import abstract_tree
from ..core._tracing import abstract_key
from ..sharding import Coupling, coupling_sentence
from ..sharding.report._data import ProgramReport
from ._loss import ExaminedLoss


def warn_if_not_mean(
    loss: ExaminedLoss, rows: int, program: ProgramReport | None = None, *, of_loss: bool = True
) -> None:
    """Warns if the mean of a loss over batches of `rows` is not its mean over their examples.

    `program` is a plan's report on the loss, if there is one. Without `of_loss`, a loss that is a
    sum raises no warning.
    """
    if program is None:
        coupled = find_coupled(loss, training=False)
    else:
        coupled = program.coupled
    if coupled is not None:
        warn(
            f"{coupling_sentence(coupled)} An evaluation takes the mean over batches of "
            f"{rows}, so its result depends on `batch_size`. Compare only results with the "
            "same `batch_size`, preferably one that divides the number of examples."
        )
        return
    if program is None:
        summed, _, _ = find_faults(loss, training=False)
    else:
        summed = program.summed
    warn_of_sums(summed, loss=of_loss)


def find_coupled(loss: ExaminedLoss, *, training: bool) -> Coupling | None:
    """Finds the first operation that makes the examples of a batch depend on each other."""
    # As below, what examines programs is not imported with redcoast.
    from ..sharding._function_reports import examples_coupled

    evaluate = lambda *args: loss.evaluate(*args, training=training).loss
    model, batch = abstract_tree((loss.model, loss.batch))
    return examples_coupled(evaluate, model, (batch, abstract_key()), loss.mesh)


def find_faults(
    loss: ExaminedLoss, *, training: bool
) -> tuple[Mapping[str, str], tuple[str, ...], tuple[str, ...]]:
    """Returns the results in `(loss, aux)` that are sums over the examples, by path, with their
    lines; the lines that use one random mask for all examples; and the lines where NumPy's rank
    promotion combines each example with every other."""
    from ..sharding._function_reports import batch_faults

    def results(*args: PyTree) -> PyTree:
        result = loss.evaluate(*args, training=training)
        return result.loss, result.aux

    model, batch = abstract_tree((loss.model, loss.batch))
    return batch_faults(results, model, (batch, abstract_key()), loss.mesh)


def _where(lines: Sequence[str]) -> str:
    """The lines of the user's code that are known, in parentheses."""
    # Operations inside of libraries have no line of the user's.
    known = list(filter(None, lines))
    if not known:
        return ""
    return f" ({several(known)})"


def warn_of_shared_masks(lines: Sequence[str]) -> None:
    if lines:
        where = _where(lines)
        warn(
            f"A random mask{where} is the same for every example of a batch, such as the "
            "mask of dropout with one key under `jax.vmap`. Use a key for each example: "
            "`jax.vmap(lambda x, k: model(x, key=k))(x, jax.random.split(key, len(x)))`."
        )


def warn_of_promotions(lines: Sequence[str]) -> None:
    if lines:
        where = _where(lines)
        warn(
            f"`loss_fn` combines an array of shape (n, 1) with one of shape (n,){where}, which "
            "NumPy's rank promotion broadcasts to (n, n), so every prediction is compared with the "
            "labels of all n examples. Give both the same shape, such as with "
            "`jnp.squeeze(predictions, -1)`; write `[None, :]` if all pairs are meant."
        )


def warn_of_sums(summed: Mapping[str, str], *, loss: bool = True, aux: bool = True) -> None:
    """Warns of the results `(loss, aux)` that are sums, by path."""
    named: list[str] = []
    for path, line in summed.items():
        name = path.removeprefix("1/")  # of aux, the second result
        if aux and name != path and name != "weight":  # a weight is a sum
            named.append(f"`{name}`{_where([line])}")
    for path in ("", "0"):  # of a loss alone, and of a loss with aux
        if loss and path in summed:
            named.append(f"`loss`{_where([summed[path]])}")
    if not named:
        return
    warn(
        f"`loss_fn` returns the sum over the examples of a batch, and not the mean, as "
        f"{several(named)}. A batch with more examples has a larger value, and so has its "
        "gradient; microbatches and the batches of an evaluation are averaged, so that the result "
        "depends on their size. Divide by the number of examples, as `jnp.mean` does, or "
        'by the number of tokens, and return that number as `aux["weight"]`.'
    )
