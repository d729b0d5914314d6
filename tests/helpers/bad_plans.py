"""Bad inputs to what concerns devices and plans."""

# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
from bad_helpers import (
    ABSTRACT,
    SGD,
    deleted,
    other_mesh,
    plan_file,
    written,
)
from jax.sharding import PartitionSpec as P

import redcoast as rc

INIT = lambda key: {"w": jnp.zeros((8, 8))}
LOSS = lambda model, x, key: jnp.mean((x @ model["w"]) ** 2)
X = jax.ShapeDtypeStruct((8, 8), jnp.float32)

ROWS = {
    "make_mesh": [
        (lambda d: rc.make_mesh(model=3), ValueError, "model=3.*multiple of 3 devices.*8"),
        (lambda d: rc.make_mesh(model=0), ValueError, "`model` .* but is 0"),
        (lambda d: rc.make_mesh(fsdp=-2), ValueError, "`fsdp` .* but is -2"),
        (lambda d: rc.make_mesh(data=-1, model=-1), ValueError, "-1"),
        (lambda d: rc.make_mesh(data=2, fsdp=2), ValueError, "8"),
        (lambda d: rc.make_mesh(devices=[]), ValueError, "`devices` is empty"),
        (lambda d: rc.make_mesh(model=2.0), TypeError, r"`model` is 2\.0.*an integer"),
        (lambda d: rc.make_mesh(model="2"), TypeError, "`model` is '2'.*an integer"),
        (lambda d: rc.make_mesh(devices=4), TypeError, "`devices`"),
        (lambda d: rc.make_mesh(devices="cpu"), TypeError, "`devices` .*a list of JAX devices"),
        (lambda d: rc.make_mesh(devices=deleted()), TypeError, "`devices` .*a list of JAX dev"),
        (lambda d: rc.make_mesh(pipe=3), ValueError, "pipe=3.*multiple of 3 devices.*8"),
        (lambda d: rc.make_mesh(pipe=0), ValueError, "`pipe` .* but is 0"),
        (lambda d: rc.make_mesh(pipe=1.0), TypeError, r"`pipe` is 1\.0.*an integer"),
        (lambda d: rc.make_mesh(pipe=True), TypeError, "`pipe` is True.*an integer"),
        (lambda d: rc.make_mesh(data=True), TypeError, "`data` is True.*an integer"),
    ],
    "emulate_devices": [
        (lambda d: rc.emulate_devices(0), ValueError, "`count` is 0"),
        (lambda d: rc.emulate_devices(2), ValueError, "before JAX is first used"),
        (lambda d: rc.emulate_devices("8"), TypeError, "'8'"),
    ],
    "initialize": [
        (lambda d: rc.initialize(processes="2"), TypeError, "`processes` is '2'.*an integer"),
        (lambda d: rc.initialize(process_id=[1]), TypeError, "`process_id` is of type list"),
        (lambda d: rc.initialize(coordinator=80), TypeError, "`coordinator` is 80.*host:port"),
        (lambda d: rc.initialize(timeout=None), TypeError, "`timeout` is None.*a number"),
        (lambda d: rc.initialize(process_id=2, processes=2), ValueError, "process 2"),
        (
            lambda d: rc.initialize(coordinator="somewhere", processes=2, process_id=0),
            ValueError,
            "somewhere",
        ),
    ],
    "matrix_dimensions": [
        (lambda d: rc.matrix_dimensions(ABSTRACT, 3), TypeError, "`fn`"),
        (
            lambda d: rc.matrix_dimensions(ABSTRACT, lambda model: jnp.float32(0)),
            ValueError,
            "multiplies by no array",
        ),
    ],
    "infer_shardings": [
        (lambda d: rc.infer_shardings(ABSTRACT, other_mesh()), ValueError, "axes|axis"),
        (lambda d: rc.infer_shardings(ABSTRACT, "mesh"), TypeError, "`mesh`"),
        (lambda d: rc.infer_shardings(ABSTRACT, rc.make_mesh(), fn=3), TypeError, "`fn`"),
        (lambda d: rc.infer_shardings(len, rc.make_mesh()), TypeError, "`tree`.*pass a function"),
        (
            lambda d: rc.infer_shardings(ABSTRACT, rc.make_mesh(), overrides=[("v", None)]),
            ValueError,
            "'v'",
        ),
        (
            lambda d: rc.infer_shardings(ABSTRACT, rc.make_mesh(), overrides=[("w", P("y"))]),
            ValueError,
            "'y'",
        ),
        (
            lambda d: rc.infer_shardings(
                ABSTRACT, rc.make_mesh(), overrides=[("w", P(None, None, "data"))]
            ),
            ValueError,
            "w",
        ),
        (
            lambda d: rc.infer_shardings(ABSTRACT, rc.make_mesh(), overrides="w"),
            (TypeError, ValueError),
            "override",
        ),
        (
            lambda d: rc.infer_shardings(ABSTRACT, rc.make_mesh(), overrides=[("w", "model")]),
            ValueError,
            "'w' has 'model'. It must be `None`",
        ),
        (
            lambda d: rc.infer_shardings(ABSTRACT, rc.make_mesh(), overrides=[("w", P((1,)))]),
            ValueError,
            "'w' has",
        ),
        (
            lambda d: rc.infer_shardings(
                {"w": jax.eval_shape(lambda: jnp.zeros((6, 8)))},
                rc.make_mesh(),
                overrides=[("w", P("data"))],
            ),
            ValueError,
            "w",
        ),
    ],
    "plan_shardings": [
        (
            lambda d: rc.plan_shardings(ABSTRACT, rc.make_mesh(), budget=10),
            ValueError,
            "budget|bytes",
        ),
        (
            lambda d: rc.plan_shardings(ABSTRACT, rc.make_mesh(), sequence=True),
            ValueError,
            "`sequence` needs a function",
        ),
        (
            lambda d: rc.plan_shardings(
                ABSTRACT, rc.make_mesh(), fn=lambda m, x: x @ m["w"], args=(X,), hardware="h100"
            ),
            TypeError,
            "`hardware` is 'h100'.*redcoast.Hardware",
        ),
        (
            lambda d: rc.plan_shardings(ABSTRACT, rc.make_mesh(), hardware=rc.Hardware()),
            ValueError,
            "`hardware` needs a function",
        ),
        (lambda d: rc.plan_shardings(ABSTRACT, rc.make_mesh(), budget=-1), ValueError, "budget"),
        (lambda d: rc.plan_shardings(ABSTRACT, rc.make_mesh(), budget="1"), TypeError, "budget"),
        (lambda d: rc.plan_shardings(ABSTRACT, rc.make_mesh(), sequence=3), TypeError, "sequence"),
        (
            lambda d: rc.plan_shardings(INIT(0), rc.make_mesh(), fn=LOSS, args=jnp.ones((8, 8))),
            TypeError,
            "`args` is of type .* tuple of the arguments",
        ),
        (
            lambda d: rc.plan_shardings(INIT(0), rc.make_mesh(), fn=LOSS, args=("text", None)),
            TypeError,
            r"text at args\[0\]",
        ),
        (lambda d: rc.plan_shardings(ABSTRACT, rc.make_mesh(), fn=lambda m: m["v"]), KeyError, "v"),
        (
            lambda d: rc.plan_shardings(INIT(0), rc.make_mesh(), accumulate=0),
            ValueError,
            "`accumulate` is 0",
        ),
        (
            lambda d: rc.plan_shardings(INIT(0), rc.make_mesh(), microbatches=0),
            ValueError,
            "`microbatches` is 0",
        ),
        (
            lambda d: rc.plan_shardings(INIT(0), rc.make_mesh(), microbatches=2),
            ValueError,
            "needs a pipeline, and the mesh has none",
        ),
        (
            lambda d: rc.plan_shardings(
                INIT(0), rc.make_mesh(pipe=2), fn=LOSS, args=(jnp.ones((8, 8)), None)
            ),
            ValueError,
            "Its layers are not a scan",
        ),
    ],
    "dry_run and suggest_mesh": [
        (lambda d: rc.dry_run(3, LOSS, X, SGD, target="cpu:2"), TypeError, "`init_fn`"),
        (lambda d: rc.dry_run(INIT, None, X, SGD, target="cpu:2"), TypeError, "`loss_fn`"),
        (lambda d: rc.dry_run(INIT, LOSS, X, None, target="cpu:2"), TypeError, "`optimizer`"),
        (lambda d: rc.dry_run(INIT, LOSS, X, SGD, target=8), TypeError, "`target`"),
        (lambda d: rc.dry_run(INIT, LOSS, X, SGD, target="h100:9"), ValueError, "9 devices"),
        (lambda d: rc.dry_run(INIT, LOSS, 3.0, SGD, target="cpu:2"), TypeError, "batch"),
        (lambda d: rc.dry_run(INIT, LOSS, X, SGD, target="cpu:2", mesh=2), TypeError, "`mesh`"),
        (lambda d: rc.suggest_mesh(INIT, LOSS, X, SGD, target="v4:3x3x3"), ValueError, "3x3x3"),
        (lambda d: rc.suggest_mesh(INIT, LOSS, X, SGD, compiled=0), ValueError, "`compiled`"),
        (lambda d: rc.compare_targets(INIT, LOSS, X, SGD, targets=()), ValueError, "`targets`"),
        (lambda d: rc.target_devices("h100:9"), ValueError, "9 devices"),
        (lambda d: rc.target_devices(8), TypeError, "`target`"),
    ],
    "save_plan and load_plan": [
        (
            lambda d: rc.load_plan(d / "none.json", ABSTRACT, rc.make_mesh()),
            (ValueError, FileNotFoundError),
            "none.json",
        ),
        (
            lambda d: rc.load_plan(
                written(d / "p" / "x.json", "{") / "x.json", ABSTRACT, rc.make_mesh()
            ),
            ValueError,
            "x.json",
        ),
        (
            lambda d: rc.load_plan(plan_file(d), {"v": jnp.zeros((8, 8))}, rc.make_mesh()),
            ValueError,
            "v",
        ),
        (
            lambda d: rc.load_plan(plan_file(d), {"w": jnp.zeros((8, 4))}, rc.make_mesh()),
            ValueError,
            "w",
        ),
        (lambda d: rc.save_plan({"w": 1}, d / "q.json"), TypeError, "dict"),
    ],
    "Hardware": [
        (lambda d: rc.Hardware(flops=-1.0), (TypeError, ValueError), "flops"),
        (lambda d: rc.Hardware(flops=True), TypeError, "`flops` is True"),
    ],
}
