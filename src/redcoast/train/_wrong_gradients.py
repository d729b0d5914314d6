"""Refuses programs whose gradients XLA computes wrongly."""

from jax.extend.core import JaxprEqn
from jax.sharding import Mesh

from ..core._control_flow import AnyJaxpr, Manual, control_flow
from ..core._jaxpr import iter_equations
from ..distributed._mesh import batch_shards


def refuse_wrong_gradients(jaxpr: AnyJaxpr, mesh: Mesh) -> None:
    """Raises if the jaxpr has a convolution that XLA partitions wrongly on this mesh.

    `sharding/constrain/_grouped_conv.py` describes the defect. Inside `jax.shard_map` XLA
    partitions nothing.
    """
    # The defect needs both kinds of axes.
    if mesh.shape["model"] == 1 or batch_shards(mesh) == 1:
        return
    for equation in iter_equations(jaxpr, skip=_is_manual):
        groups = equation.params.get("batch_group_count", 1)
        if equation.primitive.name == "conv_general_dilated" and groups > 1:
            sizes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
            raise ValueError(
                f"The gradient of a convolution in {groups} groups would be wrong on a mesh of "
                f"{sizes}, because of a defect of the XLA compiler if `model` is used together "
                "with `data` or `fsdp`. Constrain the loss: `plan.constrain(loss_fn)` of a plan "
                "from `rc.plan_shardings` avoids the defect. Or use a mesh with model=1."
            )


def _is_manual(equation: JaxprEqn) -> bool:
    return isinstance(control_flow(equation), Manual)
