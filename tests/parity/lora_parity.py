"""Adapters against `peft`, read and written, on models of `transformers`."""

# pyright: reportMissingImports=false

import importlib
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from agreement import record
from deepseek_v3_parity import CASES as DEEPSEEK_CASES
from dinov2_parity import CASES as DINOV2_CASES
from glm4_moe_parity import CASES as GLM4_CASES
from gpt2_parity import CASES as GPT2_CASES
from gpt_oss_parity import CASES as GPT_OSS_CASES
from harness import (
    TOLERANCE,
    apply,
    batch_for,
    difference,
    load_pretrained,
    make_reference,
    reference_outputs,
    rows_of,
)
from llama_parity import CASES as LLAMA_CASES
from mixtral_parity import CASES as MIXTRAL_CASES
from modernbert_parity import CASES as MODERNBERT_CASES
from phi3_parity import CASES as PHI3_CASES
from vit_parity import CASES as VIT_CASES

from redcoast import lora

# It says what it does by itself, and does not see its own patterns of experts.
pytestmark = pytest.mark.filterwarnings(r"ignore:::peft\..*")

LLAMA, GPT2, MIXTRAL = LLAMA_CASES[0], GPT2_CASES[0], MIXTRAL_CASES[0]
VIT, PHI3 = VIT_CASES[0], PHI3_CASES[1]
NAMED = {case.name: case for case in (*LLAMA_CASES, *MIXTRAL_CASES)}
QWEN3_MOE, OLMO2, SMOLLM3 = NAMED["qwen3 moe"], NAMED["olmo2"], NAMED["smollm3"]
BOTH = ["q_proj", "down_proj"]
READ = {
    "llama": (LLAMA, {"target_modules": BOTH, "lora_alpha": 24}),
    "rank-stabilized": (LLAMA, {"target_modules": BOTH, "use_rslora": True, "lora_alpha": 3}),
    "patterns": (
        LLAMA,
        {
            "target_modules": ["v_proj", "o_proj"],
            "rank_pattern": {r"layers\.1\.self_attn\.v_proj": 2},
            "alpha_pattern": {"o_proj": 5, r"model.layers.1.self_attn.v_proj": 1},
        },
    ),
    "one layer": (LLAMA, {"target_modules": ["gate_proj"], "layers_to_transform": [1]}),
    "head": (LLAMA, {"target_modules": ["lm_head"]}),
    "fused": (GPT2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "base": (GPT2, {"target_modules": ["c_attn"]}),
    "base of a llama": (LLAMA, {"target_modules": ["q_proj"]}),
    "parts": (PHI3, {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "olmo2": (OLMO2, {"target_modules": BOTH}),
    "smollm3": (SMOLLM3, {"target_modules": BOTH}),
    "qwen3 moe": (QWEN3_MOE, {"target_modules": ["q_proj", "o_proj"]}),
    "gpt oss": (GPT_OSS_CASES[0], {"target_modules": ["q_proj", "k_proj", "o_proj"]}),
    "deepseek v3": (DEEPSEEK_CASES[0], {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj"]}),
    "glm4 moe": (GLM4_CASES[0], {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
    "modernbert": (MODERNBERT_CASES[0], {"target_modules": ["Wqkv", "Wi", "Wo"]}),
    "dinov2": (DINOV2_CASES[2], {"target_modules": ["q_proj", "o_proj", "fc1"]}),
    "dinov2 gated": (DINOV2_CASES[1], {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "vit": (VIT, {"target_modules": ["q_proj", "o_proj", "fc1"]}),
    "classifier": (VIT, {"target_modules": ["v_proj"], "modules_to_save": ["classifier"]}),
}
TIED = next(case for case in LLAMA_CASES if case.name == "llama tied")
QUERIES = {"target_modules": ["q_proj"]}
BOTH_SAVED = ["embed_tokens", "lm_head"]
READ |= {
    "pattern of layers": (LLAMA, {"target_modules": r".*\.layers\.1\.self_attn\.[qv]_proj"}),
    "full names": (LLAMA, {"target_modules": ["model.layers.1.mlp.up_proj", "o_proj"]}),
    "excluded": (LLAMA, {**QUERIES, "exclude_modules": r".*layers\.0\..*"}),
    "part of a layer": (LLAMA, {**QUERIES, "modules_to_save": ["layers.0.mlp"]}),
    "norms": (LLAMA, {**QUERIES, "modules_to_save": ["norm"]}),
    "head and base": (LLAMA, {"target_modules": ["lm_head", "q_proj"]}),
    "tied embedding": (TIED, {**QUERIES, "modules_to_save": ["embed_tokens"]}),
    "tied head": (TIED, {**QUERIES, "modules_to_save": ["lm_head"]}),
    "tied, both": (TIED, {**QUERIES, "modules_to_save": BOTH_SAVED}),
    "tied head adapted": (TIED, {"target_modules": ["q_proj", "lm_head"]}),
    "tied embedding of gpt2": (GPT2, {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    "stays tied": (
        TIED,
        {**QUERIES, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}
READ |= {
    case.name: (case, {"target_modules": ["q_proj", "o_proj"]})
    for case in MIXTRAL_CASES
    if case.name in ("mixtral", "qwen3 moe")
}
TARGETS = r"/w[qkvo]$|gate$|up$|down$"
# Types whose experts are not modules that PEFT adapts, one whose output projections it refuses, and
# one with a pooler whose projections are not modules.
KINDS = ("gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text")
OTHER_TARGETS = dict.fromkeys(KINDS, r"/w[qkvo]$")
OTHER_TARGETS |= {"mamba2": "layers/(gate|x|steps)$", "siglip": r"layers/(w[qkvo]|up|down)$"}
WRITTEN = {
    "llama": (LLAMA, "."),
    "some": (LLAMA, ["wq", "wv", "up"]),
    "fused": (GPT2, "layers"),
    "fused in part": (GPT2, ["wv", "head|down"]),
    "experts": (MIXTRAL, ["wq", "gate", "up", "down"]),
    "parts": (PHI3, ["wq", "wk", "wv", "gate"]),
    "gpt oss": (GPT_OSS_CASES[0], ["wq", "wv", "wo"]),
    "dinov2 gated": (DINOV2_CASES[1], ["wv", "gate", "up", "down"]),
    "vit": (VIT, ["wv", "wo", "up", "down"]),
}


def logits_of(model, batch):
    return rows_of(eqx.filter_jit(apply)(model, batch), batch)


def randomised(model):
    """The model with adapters that are not zero."""
    rng = np.random.default_rng(0)
    noise = lambda x: jnp.asarray(rng.normal(0, 0.25, x.shape), x.dtype)
    return lora.with_adapters(model, jax.tree.map(noise, lora.adapters(model)))


@pytest.mark.parametrize("name", READ)
def test_reads_what_peft_has_saved(name, tmp_path):
    case, options = READ[name]
    reference = make_reference(case, tmp_path / "base")
    model, batch = load_pretrained(tmp_path / "base"), batch_for(reference, tmp_path / "base")
    torch.manual_seed(0)
    base = name.startswith("base")
    inner = reference.base_model if base else reference
    config = peft.LoraConfig(r=4, init_lora_weights=False, **options)
    adapted = peft.get_peft_model(inner, config)
    for weight_name, weight in adapted.named_parameters():
        if "modules_to_save" in weight_name:  # as if it had been trained
            weight.data += 0.5 * torch.randn(weight.shape)
    embeddings = name in ("head and base", "tied head adapted")
    adapted.eval().save_pretrained(tmp_path / "adapters", save_embedding_layers=embeddings)
    # Where the base was adapted, that is in place.
    expected = reference_outputs(reference if base else adapted, batch)
    loaded = lora.load_adapters(model, tmp_path / "adapters")
    assert difference(logits_of(model, batch), expected) > 0.01
    assert difference(logits_of(loaded, batch), expected) < TOLERANCE
    assert difference(logits_of(lora.merge(loaded), batch), expected) < TOLERANCE
    # The modules that were saved entirely are not named again.
    lora.save_adapters(loaded, tmp_path / "again")
    again = lora.load_adapters(model, tmp_path / "again")
    np.testing.assert_allclose(
        logits_of(again, batch)[0], logits_of(loaded, batch)[0], atol=TOLERANCE
    )
    if not base:
        fresh = type(reference).from_pretrained(tmp_path / "base")
        theirs = peft.PeftModel.from_pretrained(fresh, tmp_path / "again").eval()
        actual = [row.detach().numpy() for row in reference_outputs(theirs, batch)]
        assert difference(actual, expected) < TOLERANCE
    record(case, "adapters read")


@pytest.mark.parametrize("name", WRITTEN)
def test_peft_reads_what_is_saved(name, tmp_path):
    case, targets = WRITTEN[name]
    reference = make_reference(case, tmp_path / "base")
    model, batch = load_pretrained(tmp_path / "base"), batch_for(reference, tmp_path / "base")
    key = jax.random.key(0)
    model = randomised(lora.add_adapters(model, 4, targets=targets, alpha=6, key=key))
    saved = []
    if name == "vit":
        saved = ["classifier"]
        model = eqx.tree_at(lambda m: m.head.w, model, replace_fn=lambda w: 2 * w)
    lora.save_adapters(model, tmp_path / "adapters", modules_to_save=saved)
    adapted = peft.PeftModel.from_pretrained(reference, tmp_path / "adapters").eval()
    adapted.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    expected = reference_outputs(adapted, batch)
    assert difference(logits_of(lora.merge(model), batch), expected) < TOLERANCE
    assert difference(logits_of(model, batch), expected) < TOLERANCE
    if name != "experts":  # which `peft` keeps otherwise than it reads them
        loaded = lora.load_adapters(lora.merge(model), tmp_path / "theirs")
        settings = json.loads((tmp_path / "theirs/adapter_config.json").read_text())
        assert settings["r"] in (4, 12)
        assert jax.tree.structure(lora.trainable(loaded))
    record(case, "adapters written")


def first_of_each_type():
    """A case of each model type that a file of this folder compares."""
    cases = {}
    for path in sorted(Path(__file__).parent.glob("*_parity.py")):
        if path != Path(__file__):
            for case in getattr(importlib.import_module(path.stem), "CASES", ()):
                cases.setdefault(case.model.config_class.model_type, case)
    return cases


CASES = first_of_each_type()


@pytest.mark.parametrize("kind", CASES)
def test_adapters_of_every_type_go_both_ways(kind, tmp_path):
    """Of all matrices of its layers that PEFT adapts as modules."""
    case, targets = CASES[kind], OTHER_TARGETS.get(kind, TARGETS)
    reference = make_reference(case, tmp_path / "base")
    model, batch = load_pretrained(tmp_path / "base"), batch_for(reference, tmp_path / "base")
    adapted = randomised(lora.add_adapters(model, 2, targets=targets, key=jax.random.key(0)))
    lora.save_adapters(adapted, tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "ours").eval()
    expected = reference_outputs(theirs, batch)
    assert difference(logits_of(model, batch), expected) > 0.01
    assert difference(logits_of(adapted, batch), expected) < TOLERANCE
    record(case, "adapters written")
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    if getattr(model.config, "experts", None):  # which `peft` keeps otherwise than it reads them
        return
    loaded = lora.load_adapters(model, tmp_path / "theirs")
    assert difference(logits_of(loaded, batch), expected) < TOLERANCE
    record(case, "adapters read")
