"""One training step on several kinds of hardware: what fits, how fast it is, and what it costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optax
from jaxtyping import PyTree

from ..core._frames import hide_frames
from ..train._loss import LossFn
from ._dry_run import dry_run
from ._report import DryRun, gib
from ._step_time import TrainingCost, check_positive
from ._target_name import TargetDevices, parse_target


@dataclass(frozen=True)
class TargetComparison:
    """The dry runs of a training step for several targets.

    `str(comparison)` is a table, in which the targets on which the step fits come first, the
    fastest of them at the top.

    **Attributes:**

    - `runs`: The [`redcoast.DryRun`][]s by target, in the order of the table.
    - `costs`: By target, the `hours`, `device_hours` and `price` of the training run; empty if no
        number of steps was given. A target whose compiler rejected the program has none.
    - `errors`: Why the step cannot be run, for targets without a dry run.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"w": jnp.zeros((64, 64))}
        loss_fn = lambda model, x, key: jnp.mean((x @ model["w"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        targets = ("cpu:1", "cpu:4")
        comparison = rc.compare_targets(
            init_fn, loss_fn, batch, optax.sgd(0.1), targets=targets, steps=1e6, price=0.05
        )
        print(comparison)
        costs = comparison.costs
        cheapest = min(costs, key=lambda target: costs[target].price)
        ```
    """

    runs: dict[str, DryRun] = field(repr=False)
    costs: dict[str, TrainingCost]
    errors: dict[str, str]

    def __str__(self) -> str:
        has_price = any(cost.price is not None for cost in self.costs.values())
        heads = ["target", "devices", "mesh", "memory (GiB)", "step (ms)", "examples/s"]
        if self.costs:
            heads += ["hours", "device hours"]
        if has_price:
            heads.append("price")
        rows = [heads]
        for target, run in self.runs.items():
            sizes = [f"{axis}={size}" for axis, size in run.mesh.items() if size > 1]
            memory = f"{gib(run.memory['peak'])} of {gib(run.memory['usable'])}"
            if not run.fits:
                memory += ": too much"
            row = [run.target, str(run.devices), ",".join(sizes) or "-", memory]
            if run.step is not None:
                row.append(f"{run.step.seconds * 1e3:,.4g}")
                row.append(f"{run.rows / run.step.seconds:,.4g}")
            cost = self.costs.get(target)
            if cost is not None:
                row += [f"{cost.hours:,.4g}", f"{cost.device_hours:,.4g}"]
                if cost.price is not None:
                    row.append(f"{cost.price:,.2f}")
            # What is not known of a program that its compiler rejected.
            rows.append(row + ["-"] * (len(heads) - len(row)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for target, *figures in rows:
            cells = [target.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]
            lines.append("  ".join(cells).rstrip())
        for target, why in self.errors.items():
            lines.append(f"{target} cannot be used: {why}")
        notes: dict[str, None] = {}  # as a set in order: several runs may have the same note
        for run in self.runs.values():
            notes.update(dict.fromkeys(run.notes))
        return "\n".join([*lines, *notes])


@hide_frames
def compare_targets(
    init_fn: PyTree,
    loss_fn: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    targets: Sequence[str],
    steps: int | float | None = None,
    price: int | float | Mapping[str, int | float] | None = None,
    **options: Any,
) -> TargetComparison:
    """Compiles the same training step for several targets, and estimates its time on each.

    **Arguments:**

    - `init_fn`, `loss_fn`, `batch`, `optimizer`: as for [`redcoast.dry_run`][]. The batch is the
        global one, the same for all targets.
    - `targets`: the names of the targets, such as `("h100:8", "v5e:4x4")`.
    - `steps`: the number of steps of the training run.
    - `price`: the price of a device for an hour: a number, or one for each chip or target, such as
        `{"h100": 2.5, "v5e": 1.2}`.
    - `options`: further options of [`redcoast.dry_run`][], such as `compute_dtype`. The mesh of
        each target is the one with the lowest estimated cost, unless `mesh` is given.

    **Returns:**

    A [`redcoast.TargetComparison`][]; `print` it to see a table.

    **Raises:**

    `ValueError` or `TypeError` if an argument is invalid or a target does not exist; any error that
    `loss_fn` raises.

    !!! Example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"w": jnp.zeros((64, 64))}
        loss_fn = lambda model, x, key: jnp.mean((x @ model["w"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        targets = ("cpu:1", "cpu:4")
        comparison = rc.compare_targets(
            init_fn, loss_fn, batch, optax.sgd(0.1), targets=targets, steps=1e6, price=0.05
        )
        print(comparison)
        ```
    """
    if isinstance(targets, str) or not targets:
        raise ValueError(
            f'`targets` is {targets!r}. It must be a list of names, such as ("h100:8", "v5e:4x4").'
        )
    if steps is not None:
        check_positive("steps", steps)
    # Before anything is compiled, so that a mistake in `price` shows at once.
    prices: dict[str, int | float | None] = {}
    for target in map(parse_target, targets):
        prices[target.name] = price_of(price, target)
    runs: dict[str, DryRun] = {}
    errors: dict[str, ValueError] = {}
    for name in prices:
        try:
            run = dry_run(
                init_fn,
                loss_fn,
                batch,
                optimizer,
                target=name,
                # Each suggestion would be compiled, for every target.
                **{"suggest": False, **options},
            )
        # A target that cannot be used does not hide the others.
        except ValueError as error:
            errors[name] = error
        else:
            runs[name] = run
    if not runs:
        # Without a run there is nothing to compare, and the first error says why.
        raise next(iter(errors.values()))
    ordered = sorted(runs, key=lambda name: _order(runs[name]))
    costs: dict[str, TrainingCost] = {}
    for name in ordered:
        if steps is not None and runs[name].step is not None:
            costs[name] = runs[name].cost(steps, price=prices[name])
    return TargetComparison(
        runs={name: runs[name] for name in ordered},
        costs=costs,
        errors={name: str(error) for name, error in errors.items()},
    )


def price_of(
    price: int | float | Mapping[str, int | float] | None, target: TargetDevices
) -> int | float | None:
    """The price of a device of a target for an hour.

    Raises `ValueError` if there are prices, but none for this target, or one is not positive.
    """
    if isinstance(price, Mapping):
        if target.name in price:
            price = price[target.name]
        elif target.chip.name in price:
            price = price[target.chip.name]
        else:
            raise ValueError(
                f"`price` has no price for {target.name!r}, only for {', '.join(map(repr, price))}."
                f" Add one for {target.chip.name!r}."
            )
    if price is not None:
        check_positive("price", price)
    return price


def _order(run: DryRun) -> tuple[bool, float]:
    if run.step is None:
        # Those without an estimate of the time come last.
        return not run.fits, math.inf
    return not run.fits, run.step.seconds
