"""Annotations are checked at run time in the tests, those of arrays and all others."""

import dataclasses

import beartype
import jax.numpy as jnp
import jaxtyping
import pytest
from annotations import MOST_TIMES, check_annotations
from jax import Array
from jaxtyping import Float, PyTree

import redcoast as rc
from redcoast.dryrun.hlo import collectives

checked = check_annotations(typechecker=beartype.beartype)


def test_those_of_the_package_are_checked():
    assert jaxtyping.jaxtyped is check_annotations
    with pytest.raises(TypeError, match="violates type hint"):
        rc.Hardware(flops="many")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="violates type hint"):
        collectives(3, {})  # pyright: ignore[reportArgumentType]


def test_sizes_of_arrays_agree_among_arguments():
    @checked
    def add(x: Float[Array, " n"], y: PyTree[Float[Array, " n"]] | None) -> Float[Array, " n"]:
        return x

    add(jnp.ones(2), [jnp.ones(2)])
    for x, y in ((jnp.ones(2), jnp.ones(3)), (jnp.ones(2, int), None), (jnp.ones((2, 2)), None)):
        with pytest.raises(jaxtyping.TypeCheckError):
            add(x, y)


def test_other_arguments_and_results_are_checked():
    @checked
    def double(x: int) -> int:
        return x if x else ""  # pyright: ignore[reportReturnType]

    assert double(2) == 2
    for wrong in ("2", 0):
        with pytest.raises(TypeError, match="double"):
            double(wrong)


@pytest.mark.parametrize("annotation", [int, Float[Array, " n"]])
def test_a_function_made_at_each_call_is_checked_at_first(annotation):
    def make():
        def inner(x):
            return x

        inner.__annotations__["x"] = annotation
        inner.__module__ = str(annotation)  # one for each case
        return checked(inner)

    made = [make() for _ in range(MOST_TIMES + 1)]
    for inner in made[:-1]:
        with pytest.raises(TypeError):
            inner("1")
    assert made[-1]("1") == "1"


def test_each_of_many_classes_with_the_same_fields_is_checked():
    for i in range(MOST_TIMES + 1):
        kind = dataclasses.make_dataclass(f"Kind{i}", [("x", int)])
        with pytest.raises(TypeError, match="x"):
            checked(kind)("1")


def test_a_generator_gets_what_is_thrown():
    @checked
    def caught(seen: list):
        try:
            yield
        except GeneratorExit as error:
            seen.append(error)

    seen, error = [], GeneratorExit("gone")
    generator = caught(seen)
    next(generator)
    with pytest.raises(StopIteration):
        generator.throw(error)
    assert seen == [error]
