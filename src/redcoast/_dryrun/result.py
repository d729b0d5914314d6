"""What a dry run found, as data."""

from dataclasses import asdict, dataclass, field
from typing import Any

from .._sharding import Plan
from .bounds import Bounds


@dataclass(frozen=True)
class Change:
    """A change that makes a step fit, as its compiler confirmed.

    **Attributes:**

    - `what`: In words, such as `"accumulate=4"`.
    - `peak`: Bytes of memory that a device then needs.
    - `mesh`, `remat`, `accumulate`, `compute_dtype`: The step's settings with it.
    """

    what: str
    peak: int
    mesh: dict[str, int]
    remat: bool
    accumulate: int
    compute_dtype: str | None


@dataclass(frozen=True)
class DryRun:
    """A training step compiled for devices that need not be there, and what that says of it.

    `str(run)` is a table. All figures are of one device and one step.

    **Attributes:**

    - `target`, `devices`: The name of the devices, and how many they are.
    - `compiler`: Whose figures these are: `"tpu"`, `"cuda"` or `"cpu"`.
    - `notes`: Sentences that a reader of the figures must know.
    - `mesh`: The sizes of `data`, `fsdp` and `model`.
    - `fits`: Whether the peak is within the usable memory.
    - `refused`: Whether the compiler refused the program for want of memory, as those for TPUs do.
        It then says nothing of what is sent, and the peak is the least that it could come to.
    - `memory`: Bytes of `"parameters"` (and other floating-point arrays of the model),
        `"optimizer_state"`, `"other"` arrays, `"batch"`, `"gradients"` (as planned; they are among
        the temporaries), `"temporaries"` (all that is needed besides at the peak; missing if
        refused), the `"peak"` and what is `"usable"`.
    - `traffic`: What is sent, by mesh `axis`, `kind` and `cause`: how many `times`, and how many
        `bytes`; the largest first. Empty if refused.
    - `sent_bytes`: All of it; `None` if refused.
    - `arithmetic`: Floating point operations of contractions, by dtype.
    - `bounds`: The least seconds for arithmetic, memory and each network, which of them binds,
        and the utilisation of the peak that it leaves; `None` if refused.
    - `compile_seconds`: How long the compiler took.
    - `plan`: The [`redcoast.Plan`][].
    - `changes`: If it does not fit, the smallest changes found with which it does.

    !!! example

        ```python
        import json
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"w": jnp.zeros((64, 64))}
        loss_fn = lambda model, x, key: jnp.mean((x @ model["w"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        run = rc.dry_run(init_fn, loss_fn, batch, optax.adamw(1e-3), target="cpu:2")
        print(run.fits, run.memory["peak"], run.bounds.binding)
        print(json.dumps(run.report["traffic"]))
        ```
    """

    target: str
    devices: int
    compiler: str
    notes: tuple[str, ...]
    mesh: dict[str, int]
    fits: bool
    refused: bool
    memory: dict[str, int]
    traffic: tuple[dict[str, Any], ...]
    sent_bytes: int | None
    arithmetic: dict[str, float]
    bounds: Bounds | None
    compile_seconds: float
    plan: Plan = field(repr=False)
    changes: tuple[Change, ...] = ()

    @property
    def report(self) -> dict[str, Any]:
        """The same as plain data, that `json.dumps` takes."""
        names = [name for name in self.__dataclass_fields__ if name not in ("plan", "changes")]
        found = {name: getattr(self, name) for name in names}
        found |= {"notes": list(self.notes), "traffic": list(self.traffic)}
        changes = [asdict(change) for change in self.changes]
        return found | {
            "bounds": None if self.bounds is None else asdict(self.bounds),
            "plan": self.plan.report,
            "changes": changes,
        }

    def __str__(self) -> str:
        from .table import draw

        return draw(self)
