"""The devices of a target, for programs that are compiled ahead of time."""

from typing import Any

from ._devices import missing_extra, target_place


def target_devices(target: str) -> tuple[Any, ...]:
    """The devices of a target, which need not be present: programs can be compiled for them.

    A mesh of them is for plans, and for [`redcoast.compile_step`][], whose `lower` takes shapes.
    Programs cannot be run on them.

    **Arguments:**

    - `target`: a slice of TPUs such as `"v4:4x4x4"`, GPUs such as `"a100-80gb:8"` or (hosts x
        cards) `"h100:8x8"`, or emulated devices such as `"cpu:8"`.

    **Returns:**

    The devices, as JAX counts them, for `redcoast.make_mesh(devices=...)`.

    **Raises:**

    `ValueError` or `TypeError` if the target does not exist; `ImportError` if its compiler is not
    installed (`redcoast[tpu]`, `redcoast[cuda12]`; neither needs an accelerator). `RuntimeError` if
    it is installed but does not work.

    !!! example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        mesh = rc.make_mesh(model=4, devices=rc.target_devices("cpu:4"))
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        optimizer = optax.adamw(1e-3)
        init_fn = lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        make = lambda key: rc.init_state(init_fn, optimizer, key=key)
        state = eqx.filter_eval_shape(make, jax.random.key(0))
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)

        plan = rc.plan_step(state, loss_fn, batch, mesh)
        constrained = plan.constrain(loss_fn)
        step = lambda state, batch: rc.train_step(
            state, batch, loss_fn=constrained, optimizer=optimizer
        )
        compiled = rc.compile_step(step, plan.shardings).lower(state, batch).compile()
        print(compiled.memory_analysis())
        ```
    """
    place = target_place(target)
    # These are devices of the CPU, for which another compiler makes other programs.
    if place.stands_in:
        assert place.target is not None
        chip = place.target.chip
        raise ImportError(
            f"The compiler for {chip.name} is not installed. `pip install "
            f"'redcoast[{missing_extra(chip)}]'` installs it, and needs no such device."
        )
    return tuple(place.devices)
