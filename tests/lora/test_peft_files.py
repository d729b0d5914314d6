"""What PEFT writes beside the factors of adapters, and which modules have any, as PEFT reads it.

`tests/parity/lora_parity.py` compares the same with PEFT itself.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from random_models import random_model
from safetensors.numpy import load_file, save_file

import redcoast as rc
from redcoast import lora
from redcoast.models.bart import Bart, BartConfig
from redcoast.models.gpt2 import GPT2, GPT2Config
from redcoast.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=16, width=16, layers=2, heads=4, kv_heads=2, hidden=24, tied=True)
TIED = random_model(Llama, CONFIG)
UNTIED = random_model(Llama, LlamaConfig(**{**vars(CONFIG), "tied": False}))
RNG = np.random.default_rng(0)
EMBED = RNG.normal(0, 1, (16, 16)).astype(np.float32)
HEAD = RNG.normal(0, 1, (16, 16)).astype(np.float32)
A, B = (RNG.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, 16), (16, 2)))
QUERIES = {
    f"model.layers.{i}.self_attn.q_proj.lora_{x}.weight": value
    for i in range(2)
    for x, value in (("A", A), ("B", B))
}
HEAD_NAME, EMBED_NAME = "lm_head.weight", "model.embed_tokens.weight"


def write_peft(path, tensors, **settings):
    path.mkdir(exist_ok=True)
    tensors = {f"base_model.model.{name}": np.asarray(x) for name, x in tensors.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **settings}
    (path / "adapter_config.json").write_text(json.dumps(settings))


def load(path, model, tensors, **settings):
    write_peft(path, {**QUERIES, **tensors}, **settings)
    return lora.load_adapters(model, path)


def check(model, *, embed, head):
    check_merged(model, embed=embed, head=head)
    assert jnp.any(model.layers.wq.b != 0)


def check_merged(model, *, embed, head):
    """The embedding and the head, which is the embedding's transpose if there is none."""
    np.testing.assert_allclose(model.embed, embed, rtol=1e-6)
    own = model.embed.T if model.head is None else model.head
    own = own.merged() if isinstance(own, lora.LowRank) else own
    np.testing.assert_allclose(own, np.asarray(head).T, rtol=1e-5, atol=1e-6)


SAVED = {
    "embedding": ({EMBED_NAME: EMBED}, {"modules_to_save": ["embed_tokens"]}, EMBED, None),
    "head": ({HEAD_NAME: HEAD}, {"modules_to_save": ["lm_head"]}, None, HEAD),
    "both": (
        {EMBED_NAME: EMBED, HEAD_NAME: HEAD},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        EMBED,
        HEAD,
    ),
    "both tied": (
        {EMBED_NAME: EMBED, HEAD_NAME: EMBED},
        {"modules_to_save": ["embed_tokens", "model.embed_tokens"], "ensure_weight_tying": True},
        EMBED,
        EMBED,
    ),
    "tied without a copy": (
        {EMBED_NAME: EMBED},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        EMBED,
        EMBED,
    ),
    "beside": ({EMBED_NAME: EMBED, HEAD_NAME: EMBED}, {}, EMBED, EMBED),
    "same beside": ({EMBED_NAME: TIED.embed, HEAD_NAME: TIED.embed}, {}, None, None),
    "head adapted": (
        {
            "lm_head.lora_A.weight": A,
            "lm_head.lora_B.weight": B,
            "lm_head.base_layer.weight": TIED.embed,
        },
        {},
        None,
        TIED.embed + 2 * B @ A,
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SAVED)
def test_a_tied_head_is_what_it_is_in_peft(name, tmp_path):
    """PEFT trains a copy of a module that it saves entirely: a head that was tied keeps the
    weights of before."""
    tensors, settings, embed, head = SAVED[name]
    model = load(tmp_path / "theirs", TIED, tensors, **settings)
    expected = {
        "embed": TIED.embed if embed is None else embed,
        "head": TIED.embed if head is None else head,
    }
    check(model, **expected)
    assert model.config.tied == (model.head is None) == np.array_equal(*expected.values())
    # Nothing of it is lost when the adapters are saved again, without naming it.
    lora.save_adapters(model, tmp_path / "ours")
    check(lora.load_adapters(TIED, tmp_path / "ours"), **expected)
    rc.save_pretrained(lora.merge(model), tmp_path / "merged")
    check_merged(rc.load_pretrained(tmp_path / "merged"), **expected)


def test_a_tied_embedding_that_was_trained_stays_tied_in_peft(tmp_path):
    """Its head is saved too: without it, PEFT's would keep the weights of before."""
    model = lora.add_adapters(TIED, 2, targets="wq", key=jax.random.key(0))
    lora.save_adapters(model, tmp_path, modules_to_save=["embed_tokens"])
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for name in (EMBED_NAME, HEAD_NAME):
        np.testing.assert_array_equal(tensors[f"base_model.model.{name}"], TIED.embed)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["embed_tokens", "lm_head"]
    assert settings["ensure_weight_tying"] is True


def test_an_own_head_is_split_as_the_embedding(tmp_path):
    mesh = rc.make_mesh(data=2, model=4)
    place = lambda x: jax.NamedSharding(mesh, P("model") if x is TIED.embed else P())
    model = jax.tree.map(lambda x: jax.device_put(x, place(x)), TIED)
    loaded = load(tmp_path, model, {EMBED_NAME: EMBED}, modules_to_save=["embed_tokens"])
    check(loaded, embed=EMBED, head=TIED.embed)
    assert loaded.embed.sharding.spec == P("model")
    assert loaded.head.sharding.is_equivalent_to(jax.NamedSharding(mesh, P(None, "model")), 2)


@pytest.mark.thorough
def test_heads_that_are_always_tied_are_refused(tmp_path):
    config = BartConfig(
        vocab=16, width=16, layers=1, decoder_layers=1, heads=2, hidden=16, positions=8,
        decoder_start=2,
    )  # fmt: skip
    model = Bart(config, key=jax.random.key(0))
    name = "model.encoder.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): A, name.format("B"): B, "model.shared.weight": EMBED}
    write_peft(tmp_path, tensors, modules_to_save=["shared"])
    with pytest.raises(ValueError, match="in a Bart they are the same array.*ensure_weight_tying"):
        lora.load_adapters(model, tmp_path)


def test_modules_of_some_layers_that_are_saved_entirely_come_back(tmp_path):
    down = RNG.normal(0, 1, (16, 24)).astype(np.float32)
    tensors = {"model.layers.1.mlp.down_proj.weight": down}
    model = load(tmp_path / "theirs", UNTIED, tensors, modules_to_save=["layers.1.mlp.down_proj"])
    np.testing.assert_array_equal(model.layers.down[1], down.T)
    np.testing.assert_array_equal(model.layers.down[0], UNTIED.layers.down[0])
    lora.save_adapters(model, tmp_path / "ours")
    again = lora.load_adapters(UNTIED, tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, again, model)
    assert list(load_file(tmp_path / "ours/adapter_model.safetensors")).count(
        "base_model.model.model.layers.1.mlp.down_proj.weight"
    )


def test_names_of_saved_modules_may_be_ends_of_words(tmp_path):
    """As in PEFT: `norm` is also `input_layernorm`."""
    norms = {
        f"model.layers.{i}.{name}_layernorm.weight": np.full(16, i + 2, np.float32)
        for i in range(2)
        for name in ("input", "post_attention")
    } | {"model.norm.weight": np.full(16, 7, np.float32)}
    model = load(tmp_path / "theirs", UNTIED, norms, modules_to_save=["norm"])
    assert model.norm[0] == 7
    assert model.layers.mlp_norm[1, 0] == 3
    lora.save_adapters(model, tmp_path / "ours")
    assert len(load_file(tmp_path / "ours/adapter_model.safetensors")) == len(QUERIES) + len(norms)


CHOICES = {
    "pattern": ({"target_modules": r".*\.layers\.1\.self_attn\.q_proj"}, [1]),
    "full name": ({"target_modules": ["model.layers.1.self_attn.q_proj"]}, [1]),
    "end of a name": ({"target_modules": ["layers.1.self_attn.q_proj"]}, [1]),
    "excluded": ({"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0.*"}, [1]),
    "excluded name": (
        {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
        [1],
    ),
    "layers": ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, [1]),
    "one layer": ({"target_modules": ["q_proj"], "layers_to_transform": 1}, [1]),
    "layers' pattern": (
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        [1],
    ),
    "all": ({"target_modules": ["q_proj", "embed_tokens"]}, [0, 1]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_adapters_of_the_modules_that_the_settings_choose_are_complete(name, tmp_path):
    settings, layers = CHOICES[name]
    chosen = {k: x for k, x in QUERIES.items() if int(k.split(".")[2]) in layers}
    write_peft(tmp_path, chosen, **settings)
    model = lora.load_adapters(UNTIED, tmp_path)
    for layer in range(2):
        assert bool(jnp.any(model.layers.wq.b[layer] != 0)) == (layer in layers)
    # Without one factor, the adapter is not complete.
    first = sorted(chosen)[0]
    write_peft(tmp_path, {k: x for k, x in chosen.items() if k != first}, **settings)
    with pytest.raises(ValueError, match=f"missing: base_model.model.{first}"):
        lora.load_adapters(UNTIED, tmp_path)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"target_modules": ["q_proj"]}, 0),
        ({"target_modules": ["layers.0.self_attn.q_proj"]}, 0),
        ({"target_modules": ["q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}, 0),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 1]}, 0),
        ({}, 0),
    ],
)
def test_chosen_modules_without_adapters_are_missing(settings, missing, tmp_path):
    write_peft(tmp_path, {k: x for k, x in QUERIES.items() if "layers.1" in k}, **settings)
    with pytest.raises(ValueError, match=rf"missing: \S*layers.{missing}\S*lora_A"):
        lora.load_adapters(UNTIED, tmp_path)


def test_settings_of_tools_are_passed_over_and_others_named(tmp_path):
    write_peft(tmp_path, QUERIES, unsloth_version="2025.1", _commit="0a", lora_bias=False)
    assert isinstance(lora.load_adapters(UNTIED, tmp_path).layers.wq, lora.LowRank)
    for name in ("alora_invocation_tokens", "trainable_token_indices", "layer_replication"):
        write_peft(tmp_path, QUERIES, **{name: [[1, 2]]})
        with pytest.raises(ValueError, match=f"`{name}` is"):
            lora.load_adapters(UNTIED, tmp_path)


def test_a_resized_vocabulary_is_named(tmp_path):
    more = np.zeros((20, 16), np.float32)
    for tensors in ({EMBED_NAME: more, HEAD_NAME: more}, {"lm_head.base_layer.weight": more}):
        write_peft(tmp_path, QUERIES | tensors)
        for model in (TIED, UNTIED):
            with pytest.raises(ValueError, match=r"vocabulary of 20 tokens .*resize_token_emb"):
                lora.load_adapters(model, tmp_path)


def test_adapters_of_embeddings_are_named(tmp_path):
    name = "model.embed_tokens.lora_embedding_{}"
    write_peft(tmp_path, QUERIES | {name.format("A"): A, name.format("B"): B})
    with pytest.raises(ValueError, match="adapters of embeddings .* are not implemented"):
        lora.load_adapters(UNTIED, tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_modules", 3), ("exclude_modules", [1]), ("layers_to_transform", ["1"])],
)
def test_choices_of_modules_have_a_kind(name, value, tmp_path):
    write_peft(tmp_path, QUERIES, **{name: value})
    with pytest.raises(ValueError, match=f"`{name}` in .* must be a list of n"):
        lora.load_adapters(UNTIED, tmp_path)


def test_a_gpt2_keeps_its_own_tying(tmp_path):
    """Its head has other names and another layout of its matrices."""
    config = GPT2Config(vocab=16, width=16, layers=1, heads=4, hidden=24, positions=8)
    model = random_model(GPT2, config)
    name = "transformer.h.0.mlp.c_fc.lora_{}.weight"
    up = {name.format("A"): A, name.format("B"): RNG.normal(0, 1, (24, 2)).astype(np.float32)}
    write_peft(tmp_path, up | {"transformer.wte.weight": EMBED}, modules_to_save=["wte"])
    loaded = lora.load_adapters(model, tmp_path)
    np.testing.assert_array_equal(loaded.head, model.embed.T)
    np.testing.assert_array_equal(loaded.embed, EMBED)
