"""Decoding with a model that is split over a mesh gives the tokens of one device."""

import functools as ft
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import prompts
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_models import random_model

import redcoast as rc
from redcoast.core._pytree import split
from redcoast.generate import _compiled as eager
from redcoast.generate import _streaming as streaming
from redcoast.generate import generate
from redcoast.generate._prefill import PromptChunks, read_compiled
from redcoast.generate._request import make_request
from redcoast.models import Llama, LlamaConfig
from redcoast.models._by_layer import by_layer

CONFIG = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=4, hidden=64)
MODEL = random_model(Llama, CONFIG)
ROWS, (TOKENS, MASK), _ = prompts([3, 7, 1, 5], vocab=64)
PROMPT: Any = {"mask": MASK, "max_new_tokens": 8, "eos": (5,)}
HOW: Any = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "key": jax.random.key(1)},
    "beams": {"beams": 3},
}
MESHES: dict[str, Any] = {"2x4": {"model": 4}, "fsdp": {"fsdp": 4, "model": 2}}


def request_of(**options):
    length = {"max_new_tokens": 16, "room": 32, "decoder_only": True}
    return make_request(CONFIG, rc.Decoding(**options), key=None, **length)


def loss_fn(model, batch, key):
    return jnp.mean(model(batch) ** 2)


@ft.cache
def planned(name):
    mesh = rc.make_mesh(**MESHES[name])
    plan = rc.plan_shardings(MODEL, mesh, fn=loss_fn, args=(jnp.zeros((8, 8), jnp.int32), None))
    arrays, static = eqx.partition(MODEL, eqx.is_array)
    shardings = eqx.filter(plan.shardings, lambda x: isinstance(x, NamedSharding))
    return plan, eqx.combine(jax.device_put(arrays, shardings), static)


@ft.cache
def one_device(how):
    return np.asarray(generate(MODEL, TOKENS, **PROMPT, **HOW[how]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "how"),
    few_of(
        [*(("2x4", how) for how in HOW), ("fsdp", "greedy"), ("fsdp", "beams")],
        ("2x4", "drawn"),
        ("fsdp", "beams"),
        several=True,
    ),
)
def test_called_as_it_is_a_model_stays_split(mesh, how):
    actual = generate(planned(mesh)[1], TOKENS, **PROMPT, **HOW[how])
    np.testing.assert_array_equal(actual, one_device(how))


@pytest.mark.thorough
@pytest.mark.parametrize("how", few_of(HOW, "greedy"))
def test_under_a_plan(how):
    plan, model = planned("2x4")
    decode = lambda model, tokens, mask: generate(
        model, tokens, **{**PROMPT, "mask": mask}, **HOW[how]
    )
    given = [jnp.asarray(x) for x in (TOKENS, MASK)]
    actual = eqx.filter_jit(plan.constrain(decode))(model, *given)
    np.testing.assert_array_equal(actual, one_device(how))


@pytest.mark.thorough
def test_a_stream_of_a_split_model_compiles_once():
    model = planned("2x4")[1]
    jitted: Any = streaming._advance
    before = jitted._cache_size()
    for how in ("greedy", "greedy"):
        steps = []
        actual = generate(model, TOKENS, stream=steps.append, **PROMPT, **HOW[how])
        np.testing.assert_array_equal(actual, one_device(how))
    assert jitted._cache_size() == before + 1


@pytest.mark.thorough
def test_the_rows_go_over_the_data_axis_unless_they_were_put_elsewhere():
    model = planned("2x4")[1]
    mesh = model.embed.sharding.mesh
    actual = generate(model, TOKENS, **PROMPT)
    assert actual.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
    everywhere = jax.device_put(TOKENS, NamedSharding(mesh, P()))
    chunks = PromptChunks(model, everywhere, None, request_of())
    assert isinstance(chunks.prompt, jax.Array)
    assert chunks.prompt.sharding.is_fully_replicated
    np.testing.assert_array_equal(generate(model, everywhere, **PROMPT), one_device("greedy"))
    # Three rows do not divide over two.
    few = generate(model, TOKENS[:3], **{**PROMPT, "mask": MASK[:3]})
    np.testing.assert_array_equal(few, one_device("greedy")[:3])


@pytest.mark.thorough
def test_as_a_predict_fn():
    examples = [{"tokens": TOKENS[i % 4], "mask": MASK[i % 4]} for i in range(6)]
    collate_fn = lambda some: {k: np.stack([one[k] for one in some]) for k in ("tokens", "mask")}

    def predict_fn(model, batch, key):
        return generate(model, batch["tokens"], **{**PROMPT, "mask": batch["mask"]}, beams=3)

    options: dict[str, Any] = {"collate_fn": collate_fn, "predict_fn": predict_fn, "batch_size": 4}
    actual = rc.predict_examples(MODEL, examples, mesh=rc.make_mesh(model=4), **options)
    np.testing.assert_array_equal(actual, one_device("beams")[[0, 1, 2, 3, 0, 1]])


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["greedy", "beams"])
def test_no_step_gathers_the_cache(how):
    model = planned("2x4")[1]
    request = request_of(eos=(), **HOW[how])
    read, _ = read_compiled(model, TOKENS, MASK, request)
    rest = *split(by_layer(model)), read.hidden, read.prompt, request
    program: Any = eager._run.lower(read.cache, *rest).compile().as_text()
    gathered = re.findall(r"= \(?f32\[([\d,]*)\]\S* all-gather\(", program)
    cache = CONFIG.layers * 32 * CONFIG.kv_heads * CONFIG.head_dim
    sizes = [int(np.prod([int(n) for n in shape.split(",")])) for shape in gathered]
    assert max(sizes, default=0) <= 4 * HOW[how].get("beams", 1) * CONFIG.vocab < cache
