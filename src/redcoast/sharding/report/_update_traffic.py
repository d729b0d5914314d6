"""The communication of an optimizer's update, from its program and the shardings of a plan.

Shardings are followed from the gradients, the state and the parameters through each operation, by
the same rules as in a plan of a loss. Sums over a sharded dimension are all-reduced; where two
operands are sharded differently, or an operation needs a dimension whole, one is gathered. The
collectives of `jax.shard_map` are those that the program has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from ...core._control_flow import (
    AnyJaxpr,
    Call,
    Cond,
    Kernel,
    LinearSolve,
    Manual,
    Scan,
    While,
    control_flow,
    open_jaxpr,
)
from .._mesh_axes import parts, used_axes
from ..operations import Atom, Dimension, Factor, Rule, atom_bytes, opaque_rule, rule_of, shape_of
from ..program._shared_programs import once
from ..program._walk import ASSUMED_TRIPS
from ..solver._hardware import all_gather, all_reduce
from ..tree._overrides import spec_axes
from ._constraint_traffic import Axes, find_reshard
from ._data import Traffic, total_bytes
from ._sent import Sent
from ._traffic import traffic

Spec = tuple[Axes, ...]  # the axes of each dimension
# Of a cause that is left out, as norms are: bytes, and a part of all communication.
_FEW, _SMALL = 1000, 1e-4

_REDUCED = "all-reduces in the optimizer"
_GATHERED = "all-gathers in the optimizer"
_EXCHANGED = "all-to-alls in the optimizer"
_RESHARDED = "changes of sharding in the optimizer"


def _of_parts(count: int, size: int | float) -> int | float:
    """What each device sends if all get the parts of `size` bytes that all have."""
    return (count - 1) * size


# What each device sends in a ring, from the number of devices and the bytes of its operand.
_SENT: dict[str, tuple[str, Callable[[int, int | float], int | float]]] = {
    "psum": (_REDUCED, all_reduce),
    "psum_invariant": (_REDUCED, all_reduce),
    "pmax": (_REDUCED, all_reduce),
    "pmin": (_REDUCED, all_reduce),
    "all_gather": (_GATHERED, _of_parts),
    "all_gather_invariant": (_GATHERED, _of_parts),
    # As much as an all-gather with a result of this size.
    "all_to_all": (_EXCHANGED, all_gather),
    "reduce_scatter": ("reduce-scatters in the optimizer", all_gather),
    "ppermute": ("permutations in the optimizer", lambda count, size: size),
}


def update_traffic(
    program: AnyJaxpr,
    inputs: Sequence[P],
    outputs: Sequence[P | None],
    sizes: Mapping[str, int],
    *,
    beside: int,
) -> tuple[Traffic, ...]:
    """What each device sends in an update, by cause.

    - `program`: the traced update.
    - `inputs`, `outputs`: how its arguments and its results are stored; `None` for what the plan
        of the model counts already.
    - `sizes`: those of the mesh's axes.
    - `beside`: the bytes that a device sends in the rest of the step.
    """
    walk = _Walk(sizes)
    jaxpr = open_jaxpr(program)
    operands: list[Spec] = []
    for atom, stored in zip(jaxpr.invars, inputs, strict=True):
        operands.append(walk.spec_of(stored, atom))
    results = walk.follow(jaxpr, operands)
    for atom, spec, stored in zip(jaxpr.outvars, results, outputs, strict=True):
        if stored is not None:
            walk.reshard(atom, spec, walk.spec_of(stored, atom))
    lines = traffic(walk.sent)
    least = max(_FEW, _SMALL * (beside + total_bytes(lines)))
    return tuple(line for line in lines if line.bytes > least)


@dataclass
class _Walk:
    """Follows specs through programs that run a number of times, and adds up what is sent."""

    sizes: Mapping[str, int]
    times: int = 1
    sent: list[Sent] = field(default_factory=list)

    def follow(self, jaxpr: Jaxpr, inputs: Sequence[Spec]) -> list[Spec]:
        """The specs of the results."""
        known: dict[Var, Spec] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Atom) -> Spec:
            # Literals, and what the program closes over, are on all devices.
            if isinstance(atom, Literal) or atom not in known:
                return _replicated(atom)
            return known[atom]

        for equation in jaxpr.eqns:
            operands = list(map(read, equation.invars))
            results = self._of_equation(equation, operands)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def reshard(self, atom: Atom, before: Spec, after: Spec, cause: str = _RESHARDED) -> None:
        """Adds what a change of sharding sends."""
        if before != after:
            sent = find_reshard(atom_bytes(atom), before, after, self.sizes).sent
            self._add(tuple(chain(*before)), cause, sent)

    def _reshard_all(
        self, atoms: Iterable[Atom], before: Iterable[Spec], after: Iterable[Spec]
    ) -> None:
        for change in zip(atoms, before, after, strict=True):
            self.reshard(*change)

    def spec_of(self, spec: P, atom: Atom) -> Spec:
        """The axes of each dimension, but those of one device."""
        entries: list[Axes] = []
        for entry in spec:
            entries.append(used_axes(spec_axes(entry), self.sizes))
        return (*entries, *_replicated(atom)[len(entries) :])

    def _add(self, axes: Sequence[str], cause: str, size: int | float) -> None:
        over = tuple(axis for axis in self.sizes if axis in axes)
        if size:
            self.sent.append(Sent(over, "optimizer", cause, size * self.times))

    def _of_equation(self, equation: JaxprEqn, operands: list[Spec]) -> list[Spec]:
        match control_flow(equation):
            case Scan() as scan:
                return self._scan(scan, equation, operands)
            case While() as loop:
                _, consts, carry = loop.split(operands)
                return self._loop(loop.body, ASSUMED_TRIPS, consts, carry, [])
            case Cond() as cond:
                return self._cond(cond, operands[1:])
            case Call() as call:
                return self.follow(open_jaxpr(call.jaxpr), operands)
            case Manual() as manual:
                return self._manual(manual, equation, operands)
            case LinearSolve() | Kernel():
                return self._by_rule(equation, opaque_rule(equation), operands)
        if equation.primitive.name == "sharding_constraint":
            constraint = getattr(equation.params["sharding"], "spec", P())
            spec = self.spec_of(constraint, equation.invars[0])
            self.reshard(equation.invars[0], operands[0], spec)
            return [spec]
        if equation.primitive.name in _SENT:
            return self._collective(equation)
        if not any(map(any, operands)):  # nothing is divided, so nothing is sent
            return list(map(_replicated, equation.outvars))
        return self._by_rule(equation, once(_known_or_opaque_rule, equation), operands)

    def _scan(self, scan: Scan, equation: JaxprEqn, operands: list[Spec]) -> list[Spec]:
        consts, carry, scanned = scan.split(operands)
        _, _, arrays = scan.split(list(equation.invars))
        slices: list[Spec] = []
        for atom, spec in zip(arrays, scanned, strict=True):
            # An iteration takes one element of the first dimension.
            self.reshard(atom, spec, ((), *spec[1:]))
            slices.append(spec[1:])
        results = self._loop(scan.body, scan.length, consts, carry, slices)
        for place in range(len(carry), len(results)):
            results[place] = ((), *results[place])  # (length, ...)
        return results

    def _loop(
        self, body: AnyJaxpr, trips: int, consts: list[Spec], carry: list[Spec], slices: list[Spec]
    ) -> list[Spec]:
        """The specs of the results of the last of so many iterations."""
        jaxpr, count = open_jaxpr(body), len(carry)
        inner = replace(self, times=self.times * trips)
        results = inner.follow(jaxpr, [*consts, *carry, *slices])
        # The next iteration begins with the carry as it was before.
        inner._reshard_all(jaxpr.outvars[:count], results[:count], carry)
        return [*carry, *results[count:]]

    def _cond(self, cond: Cond, operands: list[Spec]) -> list[Spec]:
        """The branch that sends the most counts."""
        branches: list[_Walk] = []
        of_branches: list[list[Spec]] = []
        for branch in cond.branches:
            inner = replace(self, sent=[])
            of_branches.append(inner.follow(open_jaxpr(branch), operands))
            branches.append(inner)
        # The parts of an array that a branch has whole cost nothing, such as those of zeros.
        results = [max(specs, key=_axis_count) for specs in zip(*of_branches, strict=True)]
        for inner, branch, specs in zip(branches, cond.branches, of_branches, strict=True):
            inner._reshard_all(open_jaxpr(branch).outvars, specs, results)
        self.sent += max(branches, key=_bytes_sent).sent
        return results

    def _manual(self, manual: Manual, equation: JaxprEqn, operands: list[Spec]) -> list[Spec]:
        params = equation.params
        inside = map(self.spec_of, params["in_specs"], equation.invars)
        self._reshard_all(equation.invars, operands, inside)
        # Each device runs it on its own parts, and sends what its collectives say.
        body = open_jaxpr(manual.body)
        self.follow(body, list(map(_replicated, body.invars)))
        return list(map(self.spec_of, params["out_specs"], equation.outvars))

    def _collective(self, equation: JaxprEqn) -> list[Spec]:
        """A collective of a program for one device, whose arrays are parts already."""
        cause, send = _SENT[equation.primitive.name]
        names = equation.params.get("axis_name", equation.params.get("axes", ()))
        # Others are axes of `jax.vmap`.
        axes = [axis for axis in spec_axes(names) if self.sizes.get(axis, 1) > 1]
        size = sum(map(atom_bytes, equation.invars))
        if axes:
            self._add(axes, cause, send(parts(axes, self.sizes), size))
        return list(map(_replicated, equation.outvars))

    def _by_rule(self, equation: JaxprEqn, rule: Rule, operands: list[Spec]) -> list[Spec]:
        along = self._axes_of_factors(equation, rule, operands)
        of_arrays = zip(equation.invars, operands, rule.operands, strict=True)
        for atom, spec, dimensions in of_arrays:
            if not isinstance(atom, Literal):
                # An operand is gathered to be sharded as the operation computes with it.
                self.reshard(atom, spec, _along(along, dimensions), _GATHERED)
        reduced = _axes_along(along, rule.reduced)
        results = [_along(along, dimensions) for dimensions in rule.results]
        if reduced:
            for atom, spec in zip(equation.outvars, results, strict=True):
                size = atom_bytes(atom) / parts(tuple(chain(*spec)), self.sizes)
                self._add(reduced, _REDUCED, all_reduce(parts(reduced, self.sizes), size))
        return results

    def _axes_of_factors(
        self, equation: JaxprEqn, rule: Rule, operands: Sequence[Spec]
    ) -> dict[Factor, Axes]:
        """The axes over which an operation is divided along each factor.

        The largest operand decides first.
        """
        local = rule.whole | rule.moved | rule.blocked | rule.indexed
        along: dict[Factor, Axes] = {}
        order = sorted(range(len(operands)), key=lambda i: -atom_bytes(equation.invars[i]))
        for i in order:
            for axes, dimension in zip(operands[i], rule.operands[i], strict=True):
                taken = set(chain(*along.values()))
                if not taken.isdisjoint(axes):
                    continue
                rest = list(axes)
                for factor in dimension:  # the slowest first
                    if not rest or factor in local or factor in along:
                        break
                    size = rule.sizes[factor]
                    own: list[str] = []
                    while rest and size % self.sizes[rest[0]] == 0:
                        size //= self.sizes[rest[0]]
                        own.append(rest.pop(0))
                    if own:
                        along[factor] = tuple(own)
                    if size > 1:
                        break
        return along


def _known_or_opaque_rule(equation: JaxprEqn) -> Rule:
    return rule_of(equation) or opaque_rule(equation)


def _along(along: Mapping[Factor, Axes], dimensions: Sequence[Dimension]) -> Spec:
    """The spec of an array from the axes of the factors of its dimensions."""
    return tuple(_axes_along(along, dimension) for dimension in dimensions)


def _axes_along(along: Mapping[Factor, Axes], factors: Iterable[Factor]) -> Axes:
    return tuple(chain(*(along.get(factor, ()) for factor in factors)))


def _replicated(atom: Atom) -> Spec:
    return ((),) * len(shape_of(atom))


def _axis_count(spec: Spec) -> int:
    """The number of mesh axes that an array is divided over."""
    return sum(map(len, spec))


def _bytes_sent(walk: _Walk) -> int | float:
    return sum(sent.bytes for sent in walk.sent)
