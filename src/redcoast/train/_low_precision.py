"""A function with its products by weights in 8 bits, without a change of the function.

The function is traced, and its program evaluated again. An array that is computed from the model
alone is a weight. A product of a weight and other values is replaced, inside of loops, branches,
compiled and rematerialised functions too. All other operations are as they were.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jaxtyping import PyTree

from ..core._control_flow import (
    AnyJaxpr,
    Call,
    CallKind,
    Cond,
    Scan,
    While,
    consts_of,
    control_flow,
    inner_jaxprs,
    open_jaxpr,
)
from ..core._errors import check_choice, check_functions, check_kind, several
from ..core._frames import hide_frames
from ..core._jaxpr import as_traced, bind_again, evaluate_jaxpr, iter_equations, struct_of
from ..core._pytree import join
from ..sharding import Traced, trace
from ..sharding.tree._leaves import flat_leaves
from ._scaled_product import Contraction, Numbers, Product, scaled_product

# Products with smaller matrices take no less time in 8 bits.
_LEAST = 32
# As many products of two numbers up to 127 have a sum below 2^31.
_MOST = 2**17


@hide_frames
def low_precision(
    fn: Callable[..., PyTree], numbers: Numbers, *, exclude: str | Sequence[str] | None = None
) -> Callable[..., PyTree]:
    """Computes the products of a function with the matrices of a model in 8 bits.

    No line of the function or of the model changes. Its program is traced, and each product of an
    array of the model with other values is computed in 8 bits, forward and backward. Parameters,
    their gradients and the optimizer's state keep their dtypes. Scales are computed from the
    arrays of each step (current scaling), so no state is added.

    - `"float8"`, for GPUs from Hopper and Ada on: arrays are `float8_e4m3fn` and cotangents
        `float8_e5m2`, with one scale each. All three products of a layer are in 8 bits, and its
        inputs are kept for the backward pass in 8 bits.
    - `"int8"`, for TPUs such as v5e and v6e: each row of the activations and each column of the
        matrix has a scale. Activations and their cotangents are computed in 8 bits, gradients of
        matrices are not.

    On other devices the results are the same and take longer. The result has a reverse-mode
    derivative only, as needed for training, and composes with `jax.vmap`, `jax.lax.scan`,
    `jax.checkpoint` and plans.

    These operations are not changed: products of two activations, as in attention; convolutions;
    products with a matrix that has a dimension below 32; and products in functions with a custom
    derivative.

    **Arguments:**

    - `fn`: a loss, a prediction, or any function `fn(model, *args)`.
    - `numbers`: `"float8"` or `"int8"`.
    - `exclude`: a regular expression, or several, that are searched in the paths of the model's
        arrays. Products with matched arrays keep their precision. By default these are the arrays
        of the last product, such as a language-model head; `()` leaves out none.

    **Returns:**

    A function with the arguments and results of `fn`. Two such functions are equal if they were
    made with equal arguments, so that `jax.jit` compiles them once.

    **Raises:**

    `ValueError` if `numbers` is another word, or if a pattern is not a regular expression. When
    the function is called, `ValueError` if a pattern matches no array of the model, or if no
    product is computed in 8 bits.

    !!! Example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import redcoast as rc

        model = eqx.nn.MLP(64, 8, 128, 2, key=jax.random.key(0))
        loss_fn = lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2)
        low = rc.low_precision(loss_fn, "float8")
        gradient = eqx.filter_jit(eqx.filter_grad(low))(model, jnp.ones((4, 64)), None)
        ```

    and `rc.fit(..., loss_fn=low, compute_dtype="bfloat16")` trains with it.
    """
    check_functions(fn=fn)
    check_choice("numbers", numbers, get_args(Numbers))
    return LowPrecision(fn, numbers, _patterns(exclude))


def _patterns(exclude: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if exclude is None:
        return None
    if isinstance(exclude, str):
        exclude = (exclude,)
    patterns = tuple(exclude)
    for pattern in patterns:
        check_kind("exclude", pattern, str, "a regular expression, or several")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"`exclude` has {pattern!r}, which is not a regular expression: {error}."
            ) from error
    return patterns


@dataclass(frozen=True)
class LowPrecision:
    """`fn(model, *args)` with its products by weights in 8 bits."""

    fn: Callable[..., PyTree]
    numbers: Numbers
    exclude: tuple[str, ...] | None

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @hide_frames
    def __call__(self, model: PyTree, *args: PyTree) -> PyTree:
        traced, arrays = trace(self.fn, model, args)
        evaluation = _Evaluation(self.numbers, self._weights(traced, model))
        weights = [frozenset([place]) for place in range(traced.arrays)]
        data = [None] * (len(arrays) - traced.arrays)
        # The arrays of the model come first, then those of the other arguments.
        values = list(map(_Value, arrays, [*weights, *data]))
        results = evaluation.run(traced.jaxpr, values)
        if not evaluation.count:
            raise ValueError(
                f"No product of `{self.__name__}` is computed in {self.numbers}. Only products "
                "with an array of its first argument can be, if both sides of the array have at "
                f"least {_LEAST} elements and `exclude` does not match it. The default of "
                "`exclude` leaves out the last product; pass `exclude=()` to include it."
            )
        return join([value.x for value in results], traced.output)

    def _weights(self, traced: Traced, model: PyTree) -> frozenset[int]:
        """The arrays whose products are in 8 bits, by their places among the arrays."""
        leaves = flat_leaves(model)
        excluded: set[int] = set()
        if self.exclude is None:
            # Imported here, so that importing redcoast takes no longer for other runs.
            from ..sharding._weight_uses import uses_in

            last = uses_in(traced, model).last_matrices(model)
            excluded |= {place for place, leaf in enumerate(leaves) if leaf.index in last}
        for pattern in self.exclude or ():
            matched: set[int] = set()
            for place, leaf in enumerate(leaves):
                if re.search(pattern, leaf.name):
                    matched.add(place)
            if not matched:
                names = several([leaf.name for leaf in leaves])
                raise ValueError(
                    f"`exclude` has {pattern!r}, which matches none of the model's arrays: {names}."
                )
            excluded |= matched
        return frozenset(range(len(leaves))) - excluded


_Weights = frozenset[int] | None


@dataclass(frozen=True)
class _Value:
    """An array of the program. `weights` are the arrays of the model that it is computed from,
    or None if anything else is."""

    x: PyTree
    weights: _Weights


@dataclass
class _Evaluation:
    """An evaluation of a program. `count` is the number of products in 8 bits."""

    numbers: Numbers
    weights: frozenset[int]
    count: int = field(default=0)

    def run(self, jaxpr: AnyJaxpr, inputs: Sequence[_Value]) -> list[_Value]:
        opened = open_jaxpr(jaxpr)
        # Constants have no part in whether a value is a weight.
        consts = [_Value(x, frozenset()) for x in consts_of(jaxpr)]
        values = [*consts, *inputs]
        env = dict(zip((*opened.constvars, *opened.invars), values, strict=True))

        def read(literal: Literal) -> _Value:
            return _Value(literal.val, frozenset())

        results = evaluate_jaxpr(opened, env, self._handle, read)
        pairs = zip(results, opened.outvars, strict=True)
        return [_Value(as_traced(value.x, atom), value.weights) for value, atom in pairs]

    def _handle(self, index: int, equation: JaxprEqn, operands: list[_Value]) -> list[_Value]:
        weights = _union(operands)
        arrays = [value.x for value in operands]
        if equation.primitive.name == "dot_general":
            product = self._product(equation, operands)
            if product is not None:
                self.count += 1
                return [_Value(scaled_product(product, arrays[0], arrays[1]), None)]
        flow = control_flow(equation)
        if isinstance(flow, Scan | While | Cond | Call) and _has_products(equation):
            if isinstance(flow, Call) and flow.kind is CallKind.PLAIN:
                return self.run(flow.jaxpr, operands)
            results = self._run_inside(flow, equation, operands)
        else:
            results = bind_again(equation, arrays)
        return [_Value(x, weights) for x in results]

    def _product(self, equation: JaxprEqn, operands: Sequence[_Value]) -> Product | None:
        """The product in 8 bits in place of this one, or None if it keeps its precision."""
        x, y = map(struct_of, equation.invars)
        result = struct_of(equation.outvars[0])
        if not (_is_wide_float(x.dtype) and _is_wide_float(y.dtype)):
            return None
        if equation.params.get("out_sharding") is not None:
            return None
        sides = [i for i, value in enumerate(operands) if self._is_weight(value)]
        has_data = any(value.weights is None for value in operands)
        # Neither two weights, such as of an adapter, nor a weight and constants.
        if len(sides) != 1 or not has_data or 0 in (*x.shape, *y.shape):
            return None
        weight = sides[0]
        (summed_x, summed_y), (batch_x, batch_y) = equation.params["dimension_numbers"]
        contraction = Contraction(
            (tuple(summed_x), tuple(summed_y)),
            (tuple(batch_x), tuple(batch_y)),
            (len(x.shape), len(y.shape)),
        )
        shape = (x, y)[weight].shape
        dims = contraction.summed[weight], contraction.free(weight)
        # Rows and columns of the matrix.
        sizes = [prod(shape[d] for d in side) for side in dims]
        if min(sizes) < _LEAST or max(sizes) > _MOST:
            return None
        dtypes = np.dtype(x.dtype), np.dtype(y.dtype)
        return Product(self.numbers, contraction, weight, dtypes, np.dtype(result.dtype))

    def _is_weight(self, value: _Value) -> bool:
        return bool(value.weights) and value.weights <= self.weights

    def _run_inside(
        self, flow: Scan | While | Cond | Call, equation: JaxprEqn, operands: Sequence[_Value]
    ) -> list[PyTree]:
        pairs = zip(operands, equation.invars, strict=True)
        arrays = [as_traced(value.x, atom) for value, atom in pairs]
        marks = [value.weights for value in operands]
        match flow:
            case Scan():
                return self._scan(flow, arrays, marks)
            case While() if not _ends_by_rows(flow):
                return self._while(flow, arrays, marks)
            case Cond():
                # The first operand is the number of the branch.
                branches = [self._function(branch, marks[1:]) for branch in flow.branches]
                return list(jax.lax.switch(arrays[0], branches, *arrays[1:]))
            case Call(kind=CallKind.REMAT):
                run = self._function(flow.jaxpr, marks)
                run = jax.checkpoint(run, prevent_cse=flow.prevent_cse, policy=flow.policy)
                return list(run(*arrays))
            case _:  # it has a derivative of its own
                return bind_again(equation, arrays)

    def _function(self, jaxpr: AnyJaxpr, marks: Sequence[_Weights]) -> Callable[..., list[PyTree]]:
        def function(*arrays: PyTree) -> list[PyTree]:
            return [value.x for value in self.run(jaxpr, list(map(_Value, arrays, marks)))]

        return function

    def _scan(self, scan: Scan, arrays: list[PyTree], marks: list[_Weights]) -> list[PyTree]:
        consts, init, xs = scan.split(arrays)
        of_consts, _, of_xs = scan.split(marks)
        # What is carried may be data from the second iteration on, whatever it was at first.
        body = self._function(scan.body, [*of_consts, *[None] * scan.carry, *of_xs])
        return scan.run(lambda inputs: body(*inputs), consts, init, xs)

    def _while(self, loop: While, arrays: list[PyTree], marks: list[_Weights]) -> list[PyTree]:
        cond_consts, body_consts, init = loop.split(arrays)
        of_cond, of_body, carry = loop.split(marks)
        carried = [None] * len(carry)
        keep_going = self._function(loop.cond, [*of_cond, *carried])
        body = self._function(loop.body, [*of_body, *carried])
        return list(
            jax.lax.while_loop(
                lambda carry: keep_going(*cond_consts, *carry)[0],
                lambda carry: body(*body_consts, *carry),
                init,
            )
        )


def _is_wide_float(dtype: jnp.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def _union(operands: Sequence[_Value]) -> frozenset[int] | None:
    weights: frozenset[int] = frozenset()
    for value in operands:
        if value.weights is None:
            return None
        weights |= value.weights
    return weights


def _ends_by_rows(loop: While) -> bool:
    """Whether each row ends on its own, as under `vmap`."""
    return struct_of(open_jaxpr(loop.cond).outvars[0]).shape != ()


def _has_products(equation: JaxprEqn) -> bool:
    """Whether a loop, a branch or a call has a product inside."""
    for jaxpr in inner_jaxprs(equation):
        if any(inner.primitive.name == "dot_general" for inner in iter_equations(jaxpr)):
            return True
    return False
