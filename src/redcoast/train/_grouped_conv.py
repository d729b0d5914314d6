from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params
from jax.sharding import Mesh

from ..distributed._mesh import batch_shards


def refuse_wrong_gradients(jaxpr: Jaxpr, mesh: Mesh) -> None:
    """Raises where XLA is known to compute a wrong gradient.

    The gradient of a grouped convolution's kernel is a convolution with `batch_group_count > 1`.
    If its batch is split over one axis of the mesh while another axis has nothing to do, XLA's
    partitioner adds the same terms once for each device of the other axis (jax 0.4.35 to 0.10.2):
    the gradient is too large by that axis' size, and the loss is right.
    """
    if mesh.shape["model"] == 1 or batch_shards(mesh) == 1:
        return
    for equation in _equations(jaxpr):
        groups = equation.params.get("batch_group_count", 1)
        if equation.primitive.name == "conv_general_dilated" and groups > 1:
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
            raise ValueError(
                f"The gradient of a convolution in {groups} groups comes out wrong on a mesh of "
                f"{sizes}: a defect of the XLA compiler where `model` and `data` or `fsdp` are "
                "used together. Constrain the loss, `plan.constrain(loss_fn)` of a plan from "
                "`rc.plan_shardings`, which computes it right; or use a mesh with model=1."
            )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "shard_map":
            continue  # each device computes its own part: nothing is left to the partitioner
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)
