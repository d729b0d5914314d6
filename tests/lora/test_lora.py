"""Adapters: nothing changes at first, only they are trained, and files say what PEFT reads."""

import dataclasses
import functools as ft
import json
import re
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decoder_checks import assert_close, logits_of, loss_of, make_tokens
from grids import few_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from published import apply, make_batch
from random_models import random_model, to_device
from safetensors.numpy import load_file, save_file
from stored_outputs import STORED_OUTPUTS

import redcoast as rc
from redcoast import lora
from redcoast.models.dinov3 import Dinov3, Dinov3Config
from redcoast.models.gpt2 import GPT2, GPT2Config
from redcoast.models.llama import Llama, LlamaConfig
from redcoast.models.mixtral import Mixtral, MixtralConfig
from redcoast.models.vit import ViT, ViTConfig
from redcoast.pretrained._registry import find_family
from redcoast.pretrained._safetensors import read_safetensors, write_safetensors

CONFIG = LlamaConfig(vocab=16, width=16, layers=2, heads=4, kv_heads=2, hidden=24)
MODEL = random_model(Llama, CONFIG)
TOKENS = make_tokens(CONFIG)
KEY = jax.random.key(0)
KINDS = {case["settings"]["model_type"]: name for name, case in STORED_OUTPUTS.items()}.values()
GPT2_CONFIG = GPT2Config(vocab=16, width=16, layers=2, heads=4, hidden=24, positions=8)


def adapted(model=MODEL, targets=".", rank=3, alpha=6):
    """A model with adapters that are not zero."""
    return randomised(lora.add_adapters(model, rank, targets=targets, alpha=alpha, key=KEY))


def randomised(model):
    rng = np.random.default_rng(0)
    noise = lambda x: to_device(rng.normal(0, 0.25, x.shape), x.dtype)
    return lora.with_adapters(model, jax.tree.map(noise, lora.adapters(model)))


def paths(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


@ft.cache
def adapted_everywhere():
    return adapted()


@pytest.mark.thorough
def test_nothing_changes_at_first():
    model = lora.add_adapters(MODEL, 3, targets="layers/w[qkvo]", key=KEY)
    assert_close(logits_of(model, TOKENS), logits_of(MODEL, TOKENS), 1e-6)


@pytest.mark.thorough
def test_the_matched_matrices_are_adapted():
    actual = paths(lora.adapters(lora.add_adapters(MODEL, 3, targets=["wq", "wo"], key=KEY)))
    assert {path: x.shape for path, x in actual.items()} == {
        "layers/wq/a": (2, 16, 3),
        "layers/wq/b": (2, 3, 4, 4),
        "layers/wo/a": (2, 4, 4, 3),
        "layers/wo/b": (2, 3, 16),
    }
    np.testing.assert_allclose(jnp.std(actual["layers/wq/a"]), 1 / 4, rtol=0.3)
    every = {path.rpartition("/")[0] for path in paths(lora.adapters(adapted_everywhere()))}
    layers = {f"layers/{name}" for name in ("wq", "wk", "wv", "wo", "gate", "up", "down")}
    assert every == {*layers, "head"}


@pytest.mark.thorough
def test_merged_weights_are_the_sums():
    merged, head = lora.merge(adapted_everywhere()), adapted_everywhere().head
    assert jax.tree.structure(merged) == jax.tree.structure(MODEL)
    np.testing.assert_allclose(merged.head, head.weight + 2 * head.a @ head.b, rtol=1e-5)
    assert_close(logits_of(merged, TOKENS), logits_of(adapted_everywhere(), TOKENS))
    assert jnp.max(jnp.abs(logits_of(merged, TOKENS) - logits_of(MODEL, TOKENS))) > 0.1


@pytest.mark.thorough
def test_without_adapters_the_arrays_are_those_from_before():
    """Not copies: a frozen reference that shares its base costs no memory."""
    before = jax.tree.leaves(MODEL)
    after = jax.tree.leaves(lora.without_adapters(adapted()))
    assert [x is y for x, y in zip(after, before, strict=True)] == [True] * len(before)


@pytest.mark.thorough
def test_each_expert_has_an_adapter_of_its_own():
    config = MixtralConfig(vocab=16, width=16, layers=1, heads=2, kv_heads=2, hidden=8, experts=4)
    model = adapted(random_model(Mixtral, config), "gate|down")
    assert model.layers.gate.a.shape == (1, 4, 16, 3)
    assert_close(logits_of(lora.merge(model), TOKENS), logits_of(model, TOKENS))


@pytest.mark.parametrize("name", few_of(KINDS, "gpt2 relu", "mixtral three of six", "phi3 long"))
def test_all_matrices_of_every_family_are_multiplied_by(name):
    # Whatever else a model did with an adapted weight would raise.
    case = STORED_OUTPUTS[name]
    family, config = find_family(case["settings"], name)
    model_class = family.model
    model = eqx.filter_eval_shape(model_class, config, key=KEY)
    model = eqx.filter_eval_shape(lora.add_adapters, model, 2, targets=".", key=KEY)
    batch = make_batch(case["settings"], pixels=case["pixels"], text=case["text"])
    assert eqx.filter_eval_shape(apply, model, batch).dtype == jnp.float32
    rest = {path.rpartition("/")[2] for path in paths(model)} - {"weight", "a", "b"}
    vectors_and_tables = "embed|norm|shift|bias|^b[qkvo]$|cls_token|sinks"
    newer = "mask_token|register_tokens|attention_scale|mlp_scale|logit_scale"
    newer += "|^(correction|query|log_decay|skip|scalar|shared_router)$"
    kernels = "^(conv_[xbcqkv]|first|second)$"  # of convolutions
    known = re.compile(f"{vectors_and_tables}|{newer}|{kernels}")
    unknown = [name for name in rest if not known.search(name)]
    assert not unknown


@pytest.mark.thorough
def test_linear_layers_are_adapted_anywhere():
    mlp = eqx.nn.MLP(4, 3, 8, depth=2, key=KEY)
    model = adapted({"mlp": mlp, "scale": jnp.ones(())}, "mlp/layers/[01]/weight", rank=2)
    assert model["mlp"].layers[0].weight.b.shape == (2, 8)
    merged, x = lora.merge(model), jnp.arange(4.0)
    assert merged["mlp"].layers[0].weight.shape == (8, 4)
    np.testing.assert_allclose(model["mlp"](x), merged["mlp"](x), rtol=1e-5)
    assert not np.allclose(model["mlp"](x), mlp(x))


@pytest.mark.thorough
def test_stacked_linear_layers_are_adapted():
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(jax.random.split(KEY, 3))
    model = adapted(layers, rank=2)
    run = lambda model: jax.lax.scan(lambda x, layer: (layer(x), None), jnp.ones(4), model)[0]
    assert model.weight.a.shape == (3, 4, 2)
    np.testing.assert_allclose(run(model), run(lora.merge(model)), rtol=1e-5)


def test_adapters_are_made_abstractly_and_in_jit():
    add = ft.partial(lora.add_adapters, targets="wq")
    abstract = eqx.filter_eval_shape(Llama, CONFIG, key=KEY)
    abstract = eqx.filter_eval_shape(add, abstract, 3, key=KEY)
    made = eqx.filter_jit(add)(MODEL, 3, key=KEY)
    assert jax.tree.structure(abstract) == jax.tree.structure(made)
    assert abstract.layers.wq.b.shape == made.layers.wq.b.shape == (2, 3, 4, 4)


@pytest.mark.thorough
def test_adapters_of_bfloat16_weights_are_float32():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), MODEL)
    model = adapted(half, "layers/w")
    assert model.layers.wq.a.dtype == model.layers.wq.b.dtype == jnp.float32
    logits = logits_of(model, TOKENS)
    assert logits.dtype == lora.merge(model).layers.wq.dtype == jnp.bfloat16
    widened = jax.tree.map(lambda x: x.astype(jnp.float32), model)
    assert_close(logits.astype(jnp.float32), logits_of(widened, TOKENS), 0.05)


def test_only_adapters_are_trained():
    model = lora.add_adapters(MODEL, 3, targets="layers/", key=KEY)
    trainable, optimizer = lora.trainable(model), optax.adam(0.02)
    state = rc.init_state(lambda _: model, optimizer, key=KEY, trainable=trainable)
    sizes = [x.size for x in jax.tree.leaves(lora.adapters(model))]
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) == 2 * sum(sizes) + 1
    step = eqx.filter_jit(
        ft.partial(
            rc.train_step,
            loss_fn=lambda model, tokens, key: loss_of(model, tokens),
            optimizer=optimizer,
            trainable=trainable,
        )
    )
    losses = []
    for _ in range(8):
        state, metrics = step(state, TOKENS)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    after, before = paths(state.model), paths(model)
    moved = {path for path in after if not np.array_equal(after[path], before[path])}
    assert moved == paths(lora.adapters(model)).keys()


@pytest.mark.thorough
def test_fit_trains_adapters_alone():
    examples = list(np.asarray(TOKENS))
    model = lora.add_adapters(MODEL, 2, targets="w[qv]", key=KEY)
    state = rc.fit(
        model,
        optax.adam(0.01),
        examples,
        collate_fn=np.stack,
        loss_fn=lambda model, tokens, key: loss_of(model, tokens),
        batch_size=2,
        steps=2,
        trainable=lora.trainable(model),
        mesh=rc.make_mesh(data=1, model=2, devices=jax.devices()[:2]),
        log=False,
    )
    np.testing.assert_array_equal(state.model.layers.wq.weight, MODEL.layers.wq)
    assert jnp.any(state.model.layers.wq.b != 0)


def test_adapters_are_saved_and_loaded_alone(tmp_path):
    rc.save_checkpoint(tmp_path / "adapters", lora.adapters(adapted_everywhere()))
    fresh = lora.add_adapters(MODEL, 3, targets=".", alpha=6, key=jax.random.key(1))
    loaded = rc.load_checkpoint(tmp_path / "adapters", lora.adapters(fresh))
    again = paths(lora.with_adapters(MODEL, loaded))
    assert again.keys() == paths(adapted_everywhere()).keys()
    for path, x in paths(adapted_everywhere()).items():
        np.testing.assert_array_equal(again[path], x)


def test_other_adapters_take_the_place_of_all():
    model = lora.with_adapters(adapted_everywhere(), lora.adapters(adapted(targets="wq")))
    assert {path.rpartition("/")[0] for path in paths(lora.adapters(model))} == {"layers/wq"}
    np.testing.assert_array_equal(model.layers.wk, MODEL.layers.wk)


@pytest.mark.few("True-2")
@pytest.mark.parametrize("model", [2, 4])
@pytest.mark.parametrize("dataflow", [False, True])
def test_adapters_are_split_as_their_matrix(model, dataflow):
    config = LlamaConfig(vocab=4096, width=1024, layers=4, heads=8, kv_heads=4, hidden=2816)
    abstract = eqx.filter_eval_shape(Llama, config, key=KEY)
    abstract = eqx.filter_eval_shape(
        lora.add_adapters, abstract, 16, targets="layers/(w[qkvo]|gate|up|down)", key=KEY
    )
    tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    options = {"fn": loss_of, "args": (tokens,)} if dataflow else {}
    layers = rc.plan_shardings(abstract, rc.make_mesh(model=model), **options).shardings.layers
    at = lambda sharding: [i for i, axis in enumerate(sharding.spec) if axis == "model"]
    for name in ("wq", "wk", "wv", "gate", "up"):
        assert at(getattr(layers, name).weight) == at(getattr(layers, name).b) == [2], name
    for name in ("wo", "down"):
        assert at(getattr(layers, name).weight) == at(getattr(layers, name).a) == [1], name


@pytest.mark.thorough
def test_adapters_of_linear_layers_are_split_as_their_matrix():
    mlp = eqx.nn.MLP(64, 64, 256, depth=1, use_bias=False, key=KEY)
    plain = rc.infer_shardings(mlp, rc.make_mesh(model=4))
    model = lora.add_adapters(mlp, 4, targets=".", key=KEY)
    up, down = (layer.weight for layer in rc.infer_shardings(model, rc.make_mesh(model=4)).layers)
    assert [layer.weight for layer in plain.layers] == [up.weight, down.weight]
    assert up.weight.spec == down.a.spec == P("model")
    assert down.weight.spec == up.b.spec == P(None, "model")
    assert up.a.spec == down.b.spec == P()


@pytest.mark.thorough
def test_split_adapters_compute_the_same():
    config = dataclasses.replace(CONFIG, vocab=64, width=64, kv_heads=4, hidden=64)
    model, tokens = adapted(random_model(Llama, config), "wq|wo"), make_tokens(config, (8, 8))
    plan = rc.plan_shardings(model, rc.make_mesh(data=2, model=4), fn=loss_of, args=(tokens,))
    rows = NamedSharding(plan.mesh, P("data"))
    placed = jax.device_put((model, tokens), (plan.shardings, rows))
    loss = eqx.filter_jit(plan.constrain(loss_of))(*placed)
    np.testing.assert_allclose(loss, eqx.filter_jit(loss_of)(model, tokens), rtol=1e-5)


def test_frozen_parameters_have_no_optimizer_state_in_the_plan():
    make = lambda key: lora.add_adapters(Llama(CONFIG, key=key), 3, targets="w[qv]", key=key)
    trainable = lora.trainable(eqx.filter_eval_shape(make, KEY))
    state = eqx.filter_eval_shape(
        rc.init_state, make, optax.adam(1e-3), key=KEY, trainable=trainable
    )
    args = (jax.ShapeDtypeStruct((8, 8), jnp.int32),)
    plan = rc.plan_shardings(state, rc.make_mesh(), fn=loss_of, args=args, trainable=trainable)
    adapters = sum(4 * x.size for x in jax.tree.leaves(lora.adapters(state.model)))
    assert plan.report.program.memory.optimizer_state == pytest.approx(2 * adapters, rel=0.01)
    assert plan.report.program.memory.gradients == adapters


# PEFT's files. That the package reads and writes the same is checked where it is installed.


def test_peft_files_have_published_names_and_sides(tmp_path):
    model = adapted(targets="w[qo]")
    lora.save_adapters(model, tmp_path)
    stored = read_safetensors(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight"
    a, b = (stored[name.format("q", x)] for x in "AB")
    assert (a.shape, b.shape) == ((3, 16), (16, 3))
    np.testing.assert_array_equal(whole(a), model.layers.wq.a[1].T)
    np.testing.assert_array_equal(whole(b), model.layers.wq.b[1].reshape(3, 16).T)
    a, b = (stored[name.format("o", x)] for x in "AB")
    np.testing.assert_array_equal(whole(a), model.layers.wo.a[1].reshape(16, 3).T)
    np.testing.assert_array_equal(whole(b), model.layers.wo.b[1].T)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["fan_in_fan_out"]) == (3, 6, False)
    assert "model.layers.1.self_attn.q_proj" in settings["target_modules"]
    assert len(settings["target_modules"]) * 2 == len(stored) == 8


def whole(x):
    return x.take(tuple(slice(0, n) for n in x.shape))


@pytest.mark.parametrize("targets", [".", "layers/wv"])
def test_peft_files_are_read_back(targets, tmp_path):
    model = adapted(targets=targets)
    lora.save_adapters(model, tmp_path)
    again = lora.load_adapters(MODEL, tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for path, x in paths(model).items():
        np.testing.assert_array_equal(paths(again)[path], x)


def test_modules_that_are_saved_entirely_come_back(tmp_path):
    model = eqx.tree_at(lambda m: m.norm, adapted(targets="wv"), replace_fn=lambda x: x + 1)
    lora.save_adapters(model, tmp_path / "adapters", modules_to_save=["model.norm"])
    again = lora.load_adapters(MODEL, tmp_path / "adapters")
    for path, x in paths(model).items():
        np.testing.assert_array_equal(paths(again)[path], x)
    with pytest.raises(ValueError, match="'classifier', but no module .* lm_head|embed_tokens"):
        lora.save_adapters(model, tmp_path / "other", modules_to_save=["classifier"])
    # A file that lacks what its settings name is refused.
    lora.save_adapters(model, tmp_path / "less")
    settings = json.loads((tmp_path / "less/adapter_config.json").read_text())
    settings["modules_to_save"] = ["norm"]
    (tmp_path / "less/adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"missing: base_model.model.model.norm.weight"):
        lora.load_adapters(MODEL, tmp_path / "less")


@pytest.mark.thorough
def test_adapters_of_a_vit_have_the_names_of_both_versions(tmp_path):
    config = ViTConfig(width=16, layers=2, heads=2, hidden=32, image=(8, 8), patch=(4, 4))
    base = ViT(config, key=KEY)
    model = lora.add_adapters(base, 3, targets="w[qo]|up", key=KEY)
    lora.save_adapters(model, tmp_path / "new")
    tensors = load_file(tmp_path / "new/adapter_model.safetensors")
    assert "base_model.model.layers.1.attention.q_proj.lora_A.weight" in tensors
    # Those before version 5 of `transformers`.
    older = {"layers.": "encoder.layer.", "attention.q_proj": "attention.attention.query"}
    older |= {"attention.o_proj": "attention.output.dense", "mlp.fc1": "intermediate.dense"}
    for new, old in older.items():
        tensors = {name.replace(new, old): x for name, x in tensors.items()}
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    save_file(tensors, tmp_path / "old/adapter_model.safetensors")
    for version in ("new", "old"):
        again = lora.load_adapters(base, tmp_path / version)
        for path, x in paths(model).items():
            np.testing.assert_array_equal(paths(again)[path], x)


def test_adapters_of_the_head_alone(tmp_path):
    """Their names do not have the prefix of the base model."""
    model = adapted(MODEL, "head")
    lora.save_adapters(model, tmp_path / "head")
    loaded = lora.load_adapters(MODEL, tmp_path / "head")
    jax.tree.map(np.testing.assert_array_equal, loaded, model)


@pytest.mark.thorough
def test_adapters_of_a_dinov3_have_the_names_of_both_versions(tmp_path):
    """Before version 5 of `transformers`, its layers were not inside of a `model`."""
    config = Dinov3Config(width=16, layers=2, heads=2, hidden=32, image=8, patch=4)
    base = Dinov3(config, key=KEY)
    model = lora.add_adapters(base, 3, targets="w[qo]", key=KEY)
    lora.save_adapters(model, tmp_path / "new")
    file = "adapter_model.safetensors"
    tensors = load_file(tmp_path / "new" / file)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    older = {name.replace("model.model.layer", "model.layer"): x for name, x in tensors.items()}
    assert older.keys().isdisjoint(tensors)
    save_file(older, tmp_path / "old" / file)
    jax.tree.map(
        np.testing.assert_array_equal,
        lora.load_adapters(base, tmp_path / "old"),
        lora.load_adapters(base, tmp_path / "new"),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("targets", ["w[qkv]", "wv", "."])
def test_adapters_of_a_fused_matrix_are_one_block_and_read_as_parts(targets, tmp_path):
    base = random_model(GPT2, GPT2_CONFIG)
    model = adapted(base, targets)
    lora.save_adapters(model, tmp_path / "first")
    stored = read_safetensors(tmp_path / "first" / "adapter_model.safetensors")
    name = "base_model.model.transformer.h.0.attn.c_attn.lora_{}.weight"
    rank = 3 if targets == "wv" else 9
    assert stored[name.format("A")].shape == (rank, 16)
    assert stored[name.format("B")].shape == (48, rank)
    settings = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    assert settings["fan_in_fan_out"]
    again = lora.load_adapters(base, tmp_path / "first")
    assert_close(again.layers.attention.wv.merged(), model.layers.attention.wv.merged(), 1e-6)
    assert_close(logits_of(again, TOKENS), logits_of(model, TOKENS))
    # The parts that were read share their A, so that the block does not grow again.
    lora.save_adapters(again, tmp_path / "second")
    for name, x in read_safetensors(tmp_path / "second" / "adapter_model.safetensors").items():
        np.testing.assert_allclose(whole(x), whole(stored[name]), rtol=1e-6)


@pytest.mark.thorough
def test_adapters_of_several_ranks_and_scales(tmp_path):
    model = lora.add_adapters(MODEL, 2, targets="wq", alpha=1, key=KEY)
    model = lora.add_adapters(model, 4, targets="up", alpha=3, key=KEY)
    model = randomised(model)
    lora.save_adapters(model, tmp_path)
    again = lora.load_adapters(MODEL, tmp_path)
    assert (again.layers.wq.scale, again.layers.up.scale) == (0.5, 0.75)
    assert jax.tree.structure(again) == jax.tree.structure(model)


def write_peft(path, tensors, **settings):
    path.mkdir(exist_ok=True)
    tensors = {f"base_model.model.{name}": np.asarray(x) for name, x in tensors.items()}
    shapes = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    write_safetensors(path / "adapter_model.safetensors", shapes, iter(tensors.values()))
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (path / "adapter_config.json").write_text(json.dumps(settings))


def up_tensors(layers=(0, 1), rank=2):
    name = "model.layers.{}.mlp.up_proj.lora_{}.weight"
    return {
        name.format(layer, x): np.ones((24, rank) if x == "B" else (rank, 16), np.float32)
        for layer in layers
        for x in "AB"
    }


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / np.sqrt(2)),
        ({"alpha_pattern": {"up_proj": 8}}, 4.0),
        ({"alpha_pattern": {"gate_proj": 8}}, 2.0),
        ({"lora_dropout": 0.1, "use_dora": False, "something_new": None}, 2.0),
    ],
)
def test_scales_of_peft(settings, scale, tmp_path):
    write_peft(tmp_path, up_tensors(), **settings)
    model = lora.load_adapters(MODEL, tmp_path)
    assert model.layers.up.scale == scale
    np.testing.assert_allclose(lora.merge(model).layers.up, MODEL.layers.up + 2 * scale, rtol=1e-6)


def test_layers_may_differ(tmp_path):
    tensors = up_tensors((0,), 2) | up_tensors((1,), 1)
    write_peft(tmp_path, tensors, rank_pattern={r"layers\.1\.mlp\.up_proj": 1})
    model = lora.load_adapters(MODEL, tmp_path)
    merged = lora.merge(model)
    np.testing.assert_allclose(merged.layers.up - MODEL.layers.up, 4, rtol=1e-5)
    assert jnp.all(model.layers.up.a[1, :, 1] == 0)


def test_some_layers_may_have_none(tmp_path):
    write_peft(tmp_path, up_tensors((1,)), layers_to_transform=[1])
    merged = lora.merge(lora.load_adapters(MODEL, tmp_path))
    np.testing.assert_array_equal(merged.layers.up[0], MODEL.layers.up[0])
    np.testing.assert_allclose(merged.layers.up[1], MODEL.layers.up[1] + 4, rtol=1e-6)


# What cannot be done is said.


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
        {"something_new": 1},
    ],
)
def test_settings_of_peft_that_are_not_implemented_are_named(settings, tmp_path):
    write_peft(tmp_path, up_tensors(), **settings)
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}` is"):
        lora.load_adapters(MODEL, tmp_path)


def test_tensors_of_peft_that_do_not_fit_are_listed(tmp_path):
    tensors = up_tensors((0,)) | {"model.layers.7.mlp.up_proj.lora_A.weight": np.ones((2, 16))}
    tensors["model.layers.0.mlp.up_proj.lora_B.weight"] = np.ones((7, 2), np.float32)
    write_peft(tmp_path, tensors)
    with pytest.raises(ValueError, match="does not hold adapters of this model") as error:
        lora.load_adapters(MODEL, tmp_path)
    missing, unexpected, misshapen = str(error.value).split("; ")
    assert "layers.1.mlp.up_proj.lora_A" in missing
    assert "layers.1.mlp.up_proj.lora_B" in missing
    assert "layers.7" in unexpected
    assert "layers.0.mlp.up_proj.lora_B.weight ((7, 2), expected (24, 2))" in misshapen


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"it has no adapter_config.json"):
        lora.load_adapters(MODEL, tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ValueError, match=r"adapter_model.bin"):
        lora.load_adapters(MODEL, tmp_path)
    with pytest.raises(ValueError, match="nothing is overwritten"):
        lora.save_adapters(adapted_everywhere(), tmp_path)


def test_models_that_are_none_of_ours_are_refused(tmp_path):
    linear = eqx.nn.Linear(4, 4, key=KEY)
    with pytest.raises(ValueError, match="but got a Linear"):
        lora.save_adapters(adapted(linear, rank=1), tmp_path / "x")
    write_peft(tmp_path, up_tensors())
    with pytest.raises(ValueError, match="but got a Linear"):
        lora.load_adapters(linear, tmp_path)
    with pytest.raises(ValueError, match="has an adapter already"):
        lora.load_adapters(adapted_everywhere(), tmp_path)


def test_patterns_that_match_nothing_list_what_there_is():
    with pytest.raises(ValueError, match="matches none of the model's matrices.*layers/wq.*head"):
        lora.add_adapters(MODEL, 3, targets=["wq", "attention_norm"], key=KEY)
    with pytest.raises(ValueError, match="contains no matrix.*not its parameters alone"):
        lora.add_adapters({"w": jnp.ones((2, 2))}, 1, targets="w", key=KEY)


def test_bad_ranks_and_second_adapters_are_refused():
    with pytest.raises(ValueError, match="`rank` is 0. It must be at least 1."):
        lora.add_adapters(MODEL, 0, targets="wq", key=KEY)
    with pytest.raises(ValueError, match="layers/wq has an adapter already"):
        lora.add_adapters(adapted_everywhere(), 2, targets="wq", key=KEY)


def test_options_that_would_add_nothing_or_nan_are_refused():
    for alpha, says in (
        (0, "`alpha` is 0. It must be more than 0"),
        (float("nan"), "`alpha` is nan"),
        (float("inf"), "`alpha` is inf. It must be a finite number"),
    ):
        with pytest.raises(ValueError, match=says):
            lora.add_adapters(MODEL, 2, targets="wq", alpha=alpha, key=KEY)
    with pytest.raises(ValueError, match="`targets` is empty"):
        lora.add_adapters(MODEL, 2, targets=[], key=KEY)
    integers = eqx.tree_at(lambda x: x.weight, eqx.nn.Linear(2, 3, key=KEY), jnp.ones((3, 2), int))
    with pytest.raises(ValueError, match="weight has dtype int32, to which an adapter cannot"):
        lora.add_adapters(integers, 2, targets=".", key=KEY)


@pytest.mark.parametrize("fn", [lora.trainable, lora.adapters])
def test_models_without_adapters_are_refused(fn, tmp_path):
    with pytest.raises(ValueError, match=r"has no adapters. Add them first"):
        fn(MODEL)
    with pytest.raises(ValueError, match=r"has no adapters. Add them first"):
        lora.save_adapters(MODEL, tmp_path / "x")


def test_adapters_of_another_model_are_refused():
    wider = random_model(Llama, dataclasses.replace(CONFIG, hidden=32))
    with pytest.raises(ValueError, match=r"layers/up \(it is \(2, 16, 32\)\)"):
        lora.with_adapters(wider, lora.adapters(adapted_everywhere()))
    with pytest.raises(ValueError, match="there is no such weight"):
        lora.with_adapters({"x": jnp.ones(3)}, lora.adapters(adapted_everywhere()))


def test_a_weight_that_is_not_multiplied_says_so():
    tied = random_model(Llama, dataclasses.replace(CONFIG, tied=True))
    node = lora.LowRank(tied.embed, jnp.ones((16, 1)), jnp.ones((1, 16)), 1.0)
    with pytest.raises(ValueError, match=r"shape \(16, 16\) has an adapter"):
        eqx.tree_at(lambda m: m.embed, tied, node).hidden(TOKENS)
