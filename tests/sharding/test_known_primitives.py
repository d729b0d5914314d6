"""Whether the planner knows each primitive of the installed JAX, and where it asks for one."""

import re
from pathlib import Path

import jax
import jax.extend.core.primitives
import jax.lax.linalg
from jax.extend.core import Primitive

import redcoast.sharding
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


# What these ask for by name, which no rule says.
BY_NAME = {
    "constrain/_copied_weights.py": "products that a copy of a weight goes into as it is",
    "constrain/_function.py": "convolutions, in a warning about a defect of the compiler",
    "constrain/_gathered_layers.py": "operations that are equal but for their arrays",
    "constrain/_interpreter.py": "what runs in another form than it is",
    "constrain/_local_operation.py": "what runs in another form than it is",
    "constrain/_local_region.py": "what runs in another form than it is",
    "constrain/_product_order.py": "products, whose parameters are written again",
    "constrain/_split_conv.py": "convolutions, of which a defect of the compiler is, and pooling",
    "constrain/_split_fft.py": "scatters that overwrite",
    "constrain/_split_interpolation.py": "lookups, whose parameters are written again",
    "constrain/_stored_arrays.py": "what an array of the model is before it is used",
    "constrain/_verify.py": "constraints, which are left out",
    "memory/_flat.py": "what is cheap to compute again",
    "memory/_summarise.py": "names, in a report",
    "pipeline/_follow.py": "equations of two traces that are of one primitive",
    "pipeline/_row_rules.py": "equations of two traces that are of one primitive",
    "program/_facts.py": "names, in a report",
    "program/_interpolation.py": "products and lookups, whose parameters are read",
    "program/_local_scans.py": "random bits of one key",
    "program/_local_states.py": "what a sum of parts can go through",
    "program/_loop_weights.py": "what a gradient of a weight is summed after",
    "program/_own_rows.py": "lookups, whose parameters are written again",
    "program/_remat.py": "names that policies of `jax.checkpoint` read",
    "program/_shared_programs.py": "primitives with a mesh",
    "program/_walk.py": "constraints, whose parameters are read, and names, in a report",
    "report/_coupling.py": "counts and conditions",
    "report/_masks.py": "random bits",
    "report/_sums.py": "differences, products and quotients of numbers",
    "report/_update_traffic.py": "constraints and collectives, whose parameters are read",
    "solver/_memory_access.py": "what the compiler writes to memory",
    "solver/_operation_buffers.py": "what the compiler writes to memory",
    "solver/_peak.py": "what the compiler writes to memory",
    "solver/_peak_frames.py": "what the compiler writes to memory",
    "solver/_planned_collectives.py": "casts of weights",
}
READS_NAME = re.compile(r"primitive\.name|primitive_name\(|map\(primitive_name|operation\.name")


def test_no_other_file_asks_for_primitives_by_name():
    """What an operation does is in its rule, which all readers share."""
    folder = Path(redcoast.sharding.__file__).parent
    readers = set()
    for path in folder.rglob("*.py"):
        if path.parent.name != "operations" and READS_NAME.search(path.read_text("utf-8")):
            readers.add(path.relative_to(folder).as_posix())
    assert readers == BY_NAME.keys()
