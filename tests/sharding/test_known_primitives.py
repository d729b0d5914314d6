"""Whether the planner knows each primitive of the installed JAX."""

import jax
import jax.extend.core.primitives
import jax.lax.linalg
from jax.extend.core import Primitive

from redcoast.core._control_flow import _CALLS, _READERS
from redcoast.sharding.operations._rule_table import _TABLE

# Of these the planner assumes nothing, and the plan names them.
UNKNOWN = {
    # Calls, which are known by their jaxprs.
    *("call", "closed_call", "eval_jaxpr", "jit"),
    # Collectives and mutable arrays, inside of what a program splits itself.
    *("all_gather", "all_to_all", "get", "ppermute", "ragged_all_to_all", "swap"),
    # Neither a part of programs that are traced to be planned, nor differentiable.
    *("after_all", "custom_lin", "dce_sink", "stage", "symmetric_product"),
}


def test_primitives_of_this_version_are_known():
    """A new version of JAX may write common functions with new primitives: without rules for
    them, plans would gather what they could split."""
    names = set()
    for module in (jax.lax, jax.lax.linalg, jax.extend.core.primitives):
        members = [getattr(module, name, None) for name in dir(module)]
        names |= {member.name for member in members if isinstance(member, Primitive)}
    assert len(names) > 150
    assert names - _TABLE.keys() - _READERS.keys() - _CALLS.keys() <= UNKNOWN
