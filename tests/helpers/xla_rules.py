"""The rules of XLA's partitioner for the operations of a lowered program."""

import re

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

_PASS = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
# Operations whose regions hold a scalar function.
_OF_SCALARS = ("reduce", "reduce_window", "scatter", "select_and_scatter", "sort")


def xla_rules(fn, *avals):
    """The names of the operations that have a rule, and the rule of each as `written` has it."""
    module = jax.jit(fn).lower(*avals).compiler_ir("stablehlo")
    assert module is not None
    rules = []
    with module.context:
        PassManager.parse(_PASS).run(module.operation)
        _collect(module.operation, rules)
    return [(name, written(*_parse(rule))) for name, rule in rules]


def _collect(operation: ir.Operation, rules):
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                name = inner.operation.name.removeprefix("stablehlo.")
                if "sdy.sharding_rule" in inner.operation.attributes:
                    rule = str(inner.operation.attributes["sdy.sharding_rule"])
                    rules.append((name, rule.removeprefix("#sdy.op_sharding_rule")))
                if name not in _OF_SCALARS:
                    _collect(inner.operation, rules)


def _parse(text):
    """The arrays, sizes and kinds of a rule such as `<([i, jk])->([i, j, k]) {i=8, ...}>`."""
    arrays, _, rest = text.strip("<>").partition(" {")
    operands, results = arrays.split("->")
    sizes, _, kinds = rest.partition("}")
    size = {name: int(n) for name, n in (pair.split("=") for pair in sizes.split(", ") if pair)}
    kind = {name: set(of.split(", ")) for name, of in re.findall(r"(\w+)=\{([^}]*)\}", kinds)}
    kind.pop("blocked_propagation", None)
    return _arrays(operands), _arrays(results), size, kind


def _arrays(text):
    # A factor is a letter, or `z_` and a number after the alphabet.
    split = lambda dimension: re.findall(r"z_\d+|[a-z]", dimension)
    arrays = re.findall(r"\[([^\]]*)\]", text)
    return [[split(dimension) for dimension in array.split(", ") if dimension] for array in arrays]


def written(operands, results, size, kinds):
    """One way to write a rule: factors by letter in the order that they appear, and their kinds.

    Factors of one element are left out, since splitting them means nothing, and so are scalars.
    """
    letters = {}

    def dimension(factors):
        kept = [f for f in factors if size[f] > 1]
        return "".join(letters.setdefault(f, chr(ord("a") + len(letters))) for f in kept) or "."

    def array(dimensions):
        return " ".join(map(dimension, dimensions))

    text = ", ".join(map(array, filter(None, operands))) + " -> " + ", ".join(map(array, results))
    for name, factors in sorted(kinds.items()):
        if shown := sorted(letters[f] for f in factors if f in letters):
            text += f" {name}={''.join(shown)}"
    return text
