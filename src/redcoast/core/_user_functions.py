"""Notes on the errors of the user's functions: what they were called with, and a hint."""

import contextlib
import dataclasses
import inspect
import itertools
import traceback
from collections.abc import Callable, Mapping

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._errors import noting, several
from ._frames import LastNote, RaisedBy, is_hidden
from ._pytree import show_place

MOST = 1000  # examples that are compared
# How redcoast calls the user's functions.
_CALLS = {
    "init_fn": "init_fn(key)",
    "loss_fn": "loss_fn(model, batch, key)",
    "predict_fn": "predict_fn(model, batch, key)",
    "output_fn": "output_fn(predictions)",
    "metric_fn": "metric_fn(examples, outputs)",
    "collate_fn": "collate_fn(examples)",
    "log": "log(metrics, step)",  # or, with a parameter `state`, `log(metrics, step, state=state)`
}
ITEMS_ARE_BATCHES = (
    "If the items of `examples` are batches already, pass `batch_size=None`, or pass their "
    "examples one by one."
)
# Words of the errors that arguments in the wrong order cause.
_OF_ANOTHER_ORDER = (
    "non-iterable",
    "not callable",
    "not subscriptable",
    "Expected a callable value",
)


def takes_keyword(fn: Callable[..., object], name: str) -> bool:
    """Returns whether a function has a parameter of this name."""
    code = getattr(fn, "__code__", None)
    # For a plain function, this is cheaper than its signature. A decorator takes any keyword.
    if code is not None and not code.co_flags & inspect.CO_VARKEYWORDS:
        return name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return name in inspect.signature(fn).parameters
    except ValueError:  # functions implemented in C may have no signature
        return False


def describe(tree: PyTree, of: str = "") -> str:
    """The arrays of a tree with their shapes, such as `x float32[64, 16], y int32[64]`.

    `of` is the name of the tree, as in `batch[0] float32[64, 16]`, if it is data.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [f"{show_place(path, of)} {_kind(x)}".strip() for path, x in leaves]
    if tree is None:
        return "None"
    return several(arrays) or "empty"


def calling(
    name: str, arguments: Mapping[str, PyTree], *, where: str | Callable[[], str] = ""
) -> noting:
    """Adds notes to an error of a function: its name, its arguments, and a remedy.

    - `name`: the name of the function, one of those in `_CALLS`.
    - `arguments`: those that the note describes, by the names that it uses for them.
    - `where`: the rest of the first note, or a function that returns it.
    """

    def notes(error: BaseException) -> list[str]:
        sentences: list[str] = []
        with contextlib.suppress(Exception):  # nothing may hide the error itself
            for what, tree in arguments.items():
                sentences.append(_sentence(what, tree))
            sentences += _hints(error, name, arguments.get("batch"))
        rest = where
        if not isinstance(rest, str):
            rest = rest()
        notes: list[str] = [RaisedBy(name, rest)]
        if sentences:
            notes.append(LastNote("\n".join(sentences)))
        return notes

    return noting(notes)


def _sentence(what: str, x: PyTree) -> str:
    if what not in ("examples", "outputs"):
        verb = "is"
        if what.endswith("s"):
            verb = "are"
        return f"The {what} {verb} {describe(x, what)}."
    of_one = what.removesuffix("s")
    described = (describe(each, of_one) for each in itertools.islice(x, MOST))
    first, *others = dict.fromkeys(described) or ["missing"]
    another = ""
    if others:
        another = f", and another is {others[0]}"
    return f"The first of the {what} is {first}{another}."


def _hints(error: BaseException, name: str, batch: PyTree) -> list[str]:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    # The call itself failed, and nothing in the function.
    if isinstance(error, TypeError) and "jit-wrapped function" in str(error):
        return [
            f"`jax.jit` takes arrays only, and a module has other leaves, such as its activation "
            f"function. Pass `{name}` without `jax.jit`, since it is compiled as a part of the "
            "step; elsewhere, use `eqx.filter_jit`."
        ]
    failed_to_bind = isinstance(error, TypeError) and "argument" in str(error)
    if failed_to_bind and all(is_hidden(x.f_code.co_filename) for x in frames):
        return [f"The function is called as `{_CALLS[name]}`, and must accept these arguments."]
    if name == "init_fn":
        return [
            "A function in place of a model is called as `init_fn(key)` and returns the model. To "
            "train the parameters of a function, pass them, and call the function in `loss_fn`."
        ]
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return ["A compiled function cannot select by a mask, `x[mask]`: use `jnp.where`."]
    if isinstance(error, jax.errors.TracerArrayConversionError):
        return ["NumPy cannot compute with the arrays of a compiled function: use `jax.numpy`."]
    if isinstance(error, jax.errors.ConcretizationTypeError):
        return [
            f"`{name}` is compiled before the values of its arrays are known. In place of `if`, "
            "`float(x)` and `x.item()`, use `jnp.where` or `jax.lax.cond`, and return arrays."
        ]
    if hint := _known_words(str(error), name):
        return [hint]
    if "pmap" in str(error) or "mesh passed to shard_map" in str(error):
        return [
            f"`{name}` is one program over all devices of the mesh, and its batch is split over "
            "them. So it cannot use `jax.pmap`, or `jax.shard_map` with another mesh. Replace "
            "`jax.pmap` by `jax.vmap`, and means over devices, such as `jax.lax.pmean`, by means "
            "over the batch; leave out the `mesh` of `jax.shard_map`."
        ]
    if isinstance(error, ValueError) and "mesh AbstractMesh" in str(error):
        return [
            f"`{name}` closes over an array on a mesh with Explicit axes, such as one "
            "that was created inside `jax.set_mesh(jax.make_mesh(...))`. Make it a NumPy array, "
            "or create it inside the function, or use a mesh from `redcoast.make_mesh`, whose "
            "axes are Auto."
        ]
    if isinstance(error, RuntimeError) and "requires a key" in str(error):  # `eqx.nn.Dropout`
        return [
            f"`{name}` gets a `key`. Split it into one for each example and pass those, as in "
            "`jax.vmap(lambda x, k: model(x, key=k))(x, jax.random.split(key, len(x)))`."
        ]
    if isinstance(error, dataclasses.FrozenInstanceError):
        return [
            "A module cannot be changed in place. `eqx.tree_at` makes a changed copy: "
            "`model = eqx.tree_at(lambda m: m.weight, model, weight)`."
        ]
    if not isinstance(error, TypeError | ValueError):
        return []
    private = ("equinox._", "redcoast.")  # wrappers of methods; models that take batches
    layers: list[dict[str, PyTree]] = []
    for frame in frames:
        module = frame.f_locals.get("self")
        if isinstance(module, eqx.Module) and not type(module).__module__.startswith(private):
            layers.append(frame.f_locals)
    if batched := _batched_layer(layers, batch):
        return [
            f"`{batched}` was called with the entire batch. If it takes one example, as Equinox's "
            f"layers do, use `jax.vmap`, as in `jax.vmap(model)({_inputs_of(batch)})`.",
            *_batches_in_batch(batch),
        ]
    hints: list[str] = []
    if layers:
        layer = layers[-1]["self"]
        arrays = describe(eqx.filter(layer, eqx.is_array))
        hints.append(f"It failed in a `{type(layer).__name__}` with {arrays}.")
    return hints + _channels_first(layers) + _batches_in_batch(batch)


def _channels_first(layers: list[dict[str, PyTree]]) -> list[str]:
    """A hint for a convolution whose input has its channels elsewhere, or none."""
    if not layers:
        return []
    layer = layers[-1].get("self")
    x: PyTree = layers[-1].get("x")
    if not isinstance(layer, eqx.nn.Conv | eqx.nn.ConvTranspose) or not eqx.is_array(x):
        return []
    assert x is not None
    shape = x.shape
    if x.ndim == layer.num_spatial_dims + 2:
        shape = x.shape[1:]  # without the batch
    channels = layer.in_channels
    if shape[:1] == (channels,) and len(shape) == layer.num_spatial_dims + 1:
        return []
    advice = ""
    if shape[-1:] == (channels,):
        advice = ", as `jnp.moveaxis(x, -1, 0)` has them"
    elif channels == 1:
        advice = ", as `x[None]` has them"
    return [
        f"Its input has the shape {shape}. Equinox's convolutions take one example, with its "
        f"{channels} channel{'s' * (channels != 1)} first{advice}."
    ]


def _batches_in_batch(batch: PyTree) -> list[str]:
    """A hint for arrays that have two batch dimensions, as if batches had been stacked."""
    shapes = [getattr(x, "shape", ()) for x in jax.tree.leaves(batch)]
    begins = {shape[:2] for shape in shapes}
    first = next(iter(begins), ())
    if len(begins) != 1 or len(first) < 2:
        return []
    of_equal_rank = len({len(shape) for shape in shapes}) == 1  # as tokens and their mask are
    if of_equal_rank and first[0] != first[1]:
        return []
    return [f"All arrays of the batch begin with {first}. {ITEMS_ARE_BATCHES}"]


def _known_words(text: str, name: str) -> str:
    """A hint for an error of a library, by words of its message; empty for other errors."""
    if "Tracer.__format__" in text:
        return (
            f"`{name}` is compiled before the values of its arrays are known, so they cannot be "
            'formatted. `jax.debug.print("loss {x}", x=x)` prints them when they are computed.'
        )
    if name == "collate_fn" and "all input arrays must have the same shape" in text:
        return "Pad or cut the arrays of the examples to one shape in `collate_fn`."
    if "has been deleted" in text:
        return (
            f"`{name}` uses an array of an earlier state, which was deleted: each step takes over "
            "the memory of the state before it. Keep a copy, such as `jax.device_get(state.model)`."
        )
    if any(words in text for words in _OF_ANOTHER_ORDER):
        return f"The function is called as `{_CALLS[name]}`, with the arguments in this order."
    if "numpy.integer" in text:
        return (
            "Labels that are integers have the type int32. For probabilities or one-hot labels, "
            "use `optax.softmax_cross_entropy`."
        )
    return ""


def _inputs_of(batch: PyTree) -> str:
    """An example of how a function refers to an array of the batch."""
    if isinstance(batch, Mapping) and batch:
        key = next(iter(batch))
        if "x" in batch:
            key = "x"
        return f"batch[{key!r}]".replace("'", '"')
    if isinstance(batch, tuple | list):
        return "batch[0]"
    return "batch"


def _batched_layer(layers: list[dict[str, PyTree]], batch: PyTree) -> str | None:
    """The outermost module that was called with all rows of the batch, if the innermost was too.

    `layers` are the local names of the methods of modules that an error went through.
    """
    rows = set()
    for x in jax.tree.leaves(batch):
        if getattr(x, "shape", ()):
            rows.add(x.shape[0])

    def has_rows(x: PyTree) -> bool:
        return eqx.is_array(x) and x.ndim > 1 and x.shape[0] in rows

    for names in layers:
        if not any(map(has_rows, names.values())):
            return None
    if not layers:
        return None
    return type(layers[0]["self"]).__name__


def _kind(x: PyTree) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    return type(x).__name__
