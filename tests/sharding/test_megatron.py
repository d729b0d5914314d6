"""The structural rules against Megatron's split, written down by hand for each family.

Expected: the dimension that Megatron-LM's column-parallel (output), row-parallel (input) and
vocabulary-parallel layers split, in the layout in which Hugging Face stores the array. Where a
size is not a multiple of the model axis, the array is whole.
"""

import re

import equinox as eqx
import jax
import numpy as np
import pytest
from grids import few_of
from jax.sharding import AbstractMesh, NamedSharding

from redcoast.sharding import infer_shardings

LINEAR = {"column": 0, "row": 1, "vocab": 0, "bias": 0}  # torch stores (out, in)
CONV1D = {"column": 1, "row": 0, "vocab": 0, "bias": 0}  # GPT-2 stores (in, out)


def linear(name, out, ins, bias=False):
    shapes = {f"{name}.weight": (out, ins)}
    return shapes | ({f"{name}.bias": (out,)} if bias else {})


def norm(name, width, bias=True):
    return {f"{name}.weight": (width,)} | ({f"{name}.bias": (width,)} if bias else {})


def llama(layers, width, heads, kv_heads, hidden, vocab, tied=False):
    shapes = {"model.embed_tokens.weight": (vocab, width), "model.norm.weight": (width,)}
    shapes |= {} if tied else {"lm_head.weight": (vocab, width)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= linear(f"{at}.self_attn.q_proj", width, width)
        shapes |= linear(f"{at}.self_attn.k_proj", width // heads * kv_heads, width)
        shapes |= linear(f"{at}.self_attn.v_proj", width // heads * kv_heads, width)
        shapes |= linear(f"{at}.self_attn.o_proj", width, width)
        shapes |= linear(f"{at}.mlp.gate_proj", hidden, width)
        shapes |= linear(f"{at}.mlp.up_proj", hidden, width)
        shapes |= linear(f"{at}.mlp.down_proj", width, hidden)
        shapes |= norm(f"{at}.input_layernorm", width, bias=False)
        shapes |= norm(f"{at}.post_attention_layernorm", width, bias=False)
    return shapes


def gptj(layers, width, vocab):
    shapes = {"transformer.wte.weight": (vocab, width)} | norm("transformer.ln_f", width)
    shapes |= linear("lm_head", vocab, width, bias=True)
    for i in range(layers):
        at = f"transformer.h.{i}"
        shapes |= norm(f"{at}.ln_1", width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{at}.attn.{name}", width, width)
        shapes |= linear(f"{at}.mlp.fc_in", 4 * width, width, bias=True)
        shapes |= linear(f"{at}.mlp.fc_out", width, 4 * width, bias=True)
    return shapes


def gpt2(layers, width, vocab, positions):
    shapes = {"wte.weight": (vocab, width), "wpe.weight": (positions, width)} | norm("ln_f", width)
    for i in range(layers):
        shapes |= norm(f"h.{i}.ln_1", width) | norm(f"h.{i}.ln_2", width)
        for name, ins, out in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes |= {f"h.{i}.{name}.weight": (ins, out), f"h.{i}.{name}.bias": (out,)}
    return shapes


def opt(layers, width, vocab, positions, embed=None):
    embed = embed or width
    at = "model.decoder"
    shapes = {f"{at}.embed_tokens.weight": (vocab, embed)}
    shapes |= {f"{at}.embed_positions.weight": (positions + 2, width)}
    if embed != width:
        shapes |= linear(f"{at}.project_in", width, embed)
        shapes |= linear(f"{at}.project_out", embed, width)
    else:
        shapes |= norm(f"{at}.final_layer_norm", width)
    for i in range(layers):
        layer = f"{at}.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}.self_attn.{name}", width, width, bias=True)
        shapes |= norm(f"{layer}.self_attn_layer_norm", width) | norm(
            f"{layer}.final_layer_norm", width
        )
        shapes |= linear(f"{layer}.fc1", 4 * width, width, bias=True)
        shapes |= linear(f"{layer}.fc2", width, 4 * width, bias=True)
    return shapes


def t5(layers, width, inner, heads, hidden, vocab, gated):
    shapes = {"shared.weight": (vocab, width)}
    shapes |= {"lm_head.weight": (vocab, width)} if gated else {}
    for side, blocks in (("encoder", ["Self"]), ("decoder", ["Self", "EncDec"])):
        shapes |= norm(f"{side}.final_layer_norm", width, bias=False)
        for i in range(layers):
            at = f"{side}.block.{i}.layer"
            for j, kind in enumerate(blocks):
                for name in "qkv":
                    shapes |= linear(f"{at}.{j}.{kind}Attention.{name}", inner, width)
                shapes |= linear(f"{at}.{j}.{kind}Attention.o", width, inner)
                shapes |= norm(f"{at}.{j}.layer_norm", width, bias=False)
                if i == j == 0:
                    name = f"{at}.0.SelfAttention.relative_attention_bias.weight"
                    shapes |= {name: (32, heads)}
            last = f"{at}.{len(blocks)}"
            for name in ("wi_0", "wi_1") if gated else ("wi",):
                shapes |= linear(f"{last}.DenseReluDense.{name}", hidden, width)
            shapes |= linear(f"{last}.DenseReluDense.wo", width, hidden)
            shapes |= norm(f"{last}.layer_norm", width, bias=False)
    return shapes


def bart(layers, width, hidden, vocab, positions):
    shapes = {"model.shared.weight": (vocab, width), "final_logits_bias": (1, vocab)}
    for side, blocks in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        at = f"model.{side}"
        shapes |= {f"{at}.embed_positions.weight": (positions + 2, width)}
        shapes |= norm(f"{at}.layernorm_embedding", width)
        for i in range(layers):
            layer = f"{at}.layers.{i}"
            for block in blocks:
                for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    shapes |= linear(f"{layer}.{block}.{name}", width, width, bias=True)
                shapes |= norm(f"{layer}.{block}_layer_norm", width)
            shapes |= linear(f"{layer}.fc1", hidden, width, bias=True)
            shapes |= linear(f"{layer}.fc2", width, hidden, bias=True)
            shapes |= norm(f"{layer}.final_layer_norm", width)
    return shapes


def bert(layers, width, vocab, positions):
    at = "bert.embeddings"
    shapes = {
        f"{at}.word_embeddings.weight": (vocab, width),
        f"{at}.position_embeddings.weight": (positions, width),
        f"{at}.token_type_embeddings.weight": (2, width),
        "cls.predictions.bias": (vocab,),
        "cls.predictions.decoder.weight": (vocab, width),
    }
    shapes |= norm(f"{at}.LayerNorm", width)
    shapes |= norm("cls.predictions.transform.LayerNorm", width)
    shapes |= linear("cls.predictions.transform.dense", width, width, bias=True)
    shapes |= linear("bert.pooler.dense", width, width, bias=True)
    for i in range(layers):
        layer = f"bert.encoder.layer.{i}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= linear(f"{layer}.attention.{name}", width, width, bias=True)
        shapes |= norm(f"{layer}.attention.output.LayerNorm", width)
        shapes |= linear(f"{layer}.intermediate.dense", 4 * width, width, bias=True)
        shapes |= linear(f"{layer}.output.dense", width, 4 * width, bias=True)
        shapes |= norm(f"{layer}.output.LayerNorm", width)
    return shapes


# For each family, which arrays Megatron splits and how; all others are whole.
MEGATRON = {
    "llama": {
        "column": r"(q|k|v|gate|up)_proj",
        "row": r"(o|down)_proj",
        "vocab": r"embed_tokens|lm_head",
    },
    "gptj": {
        "column": r"(\b[qkv]_proj|fc_in)",
        "row": r"(out_proj|fc_out)\.weight",
        "vocab": r"wte|lm_head",
    },
    "gpt2": {"column": r"c_attn|c_fc", "row": r"c_proj\.weight", "vocab": r"wte"},
    "opt": {
        "column": r"\.[qkv]_proj|fc1",
        "row": r"(out_proj|fc2)\.weight",
        "vocab": r"embed_tokens",
    },
    "t5": {"column": r"\.[qkv]\.|\.wi", "row": r"\.(o|wo)\.", "vocab": r"shared|lm_head"},
    "bart": {
        "column": r"\.[qkv]_proj|fc1",
        "row": r"(out_proj|fc2)\.weight",
        "vocab": r"shared|final_logits_bias",
    },
    "bert": {
        "column": r"(query|key|value|intermediate\.dense)",
        "row": r"layer\.\d+\.(attention\.)?output\.dense\.weight",
        "vocab": r"word_embeddings|cls\.predictions\.(bias|decoder)",
    },
}

SMALL = {
    "llama": llama(2, 64, 8, 8, 176, 512),
    "llama grouped": llama(2, 128, 16, 8, 344, 512, tied=True),
    "gptj": gptj(2, 64, 512),
    "gpt2": gpt2(2, 64, 512, 128),
    "opt": opt(2, 64, 512, 128),
    "opt projected": opt(2, 64, 512, 128, embed=32),
    "t5": t5(2, 64, 64, 8, 256, 512, gated=False),
    "t5 gated": t5(2, 64, 128, 8, 160, 512, gated=True),
    "bart": bart(2, 64, 256, 512, 128),
    "bert": bert(2, 64, 512, 128),
}
REAL = {
    "llama 7b": llama(32, 4096, 32, 32, 11008, 32000),
    "llama 3 8b": llama(32, 4096, 32, 8, 14336, 128256),
    "llama 3.2 1b": llama(16, 2048, 32, 8, 8192, 128256, tied=True),
    "gptj 6b": gptj(28, 4096, 50400),
    "gpt2": gpt2(12, 768, 50257, 1024),
    "gpt2 large": gpt2(36, 1280, 50257, 1024),
    "opt 350m": opt(24, 1024, 50272, 2048, embed=512),
    "opt 1.3b": opt(24, 2048, 50272, 2048),
    "t5 base": t5(12, 768, 768, 12, 3072, 32128, gated=False),
    "t5 v1.1 xl": t5(24, 2048, 2048, 32, 5120, 32128, gated=True),
    "t5 3b": t5(24, 1024, 4096, 32, 16384, 32128, gated=False),
    "bart large": bart(12, 1024, 4096, 50265, 1024),
    "bert base": bert(12, 768, 30522, 512),
    "bert large": bert(24, 1024, 30522, 512),
}


def nested(shapes):
    tree = {}
    for name, shape in shapes.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jax.ShapeDtypeStruct(shape, np.float32)
    return tree


def megatron(family, name, shape, n):
    """The dimension that Megatron splits, None where it is whole."""
    for kind, pattern in MEGATRON[family].items():
        if re.search(pattern, name):
            dim = (CONV1D if family == "gpt2" else LINEAR)[kind] if len(shape) > 1 else 0
            dim = 1 if name == "final_logits_bias" else dim
            return dim if shape[dim] % n == 0 else None
    return None


def split_dims(tree, n):
    """The dimension of each array that is split over the model axis, by dotted path."""
    shardings = infer_shardings(tree, AbstractMesh((1, 1, n), ("data", "fsdp", "model")))
    flat, _ = jax.tree_util.tree_flatten_with_path(
        shardings, is_leaf=lambda x: isinstance(x, NamedSharding)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): next(
            (i for i, entry in enumerate(sharding.spec) if entry == "model"), None
        )
        for path, sharding in flat
    }


def agreement(shapes, found, expected):
    """The share of parameters on which two splits agree, and where they do not."""
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    wrong = {key: (found[key], dim) for key, dim in expected.items() if found[key] != dim}
    return 1 - sum(sizes[name] for name in wrong) / sum(sizes.values()), wrong


@pytest.mark.parametrize("n", few_of([4, 8], 4))
@pytest.mark.parametrize("name", few_of([*SMALL, *REAL], *SMALL))
def test_agrees_with_megatron_on_hugging_face_names(name, n):
    shapes = (SMALL | REAL)[name]
    expected = {key: megatron(name.split()[0], key, shape, n) for key, shape in shapes.items()}
    share, wrong = agreement(shapes, split_dims(nested(shapes), n), expected)
    print(f"{name}, model={n}: {100 * share:.2f} %")
    assert share == 1, wrong


def as_flax(shapes, family):
    """The same arrays with Flax's names and order: kernels (in, out), scales, embeddings."""
    tables, conv1d, flax = MEGATRON[family]["vocab"] + "|embed|wpe|relative", family == "gpt2", {}
    for name, shape in shapes.items():
        if name.endswith(".weight") and len(shape) == 1:
            flax[name.replace(".weight", ".scale")] = shape, None
        elif name.endswith(".weight") and re.search(tables, name) and "head" not in name:
            flax[name.replace(".weight", ".embedding")] = shape, name
        elif name.endswith(".weight"):
            turned = shape if conv1d else shape[::-1]
            flax[name.replace(".weight", ".kernel")] = turned, name
        else:
            flax[name] = shape, name
    return flax


def test_a_state_space_layer_is_split_between_its_projections():
    """Most of its arrays have the inner size, and the embedding tells the width."""
    width, inner = 256, 512
    shapes = {"embed.weight": (4096, width)}
    for at in ("layers.0.mixer", "layers.1.mixer"):
        shapes |= linear(f"{at}.in_proj", 2 * inner, width) | linear(f"{at}.x_proj", 48, inner)
        shapes |= linear(f"{at}.dt_proj", inner, 16, bias=True)
        shapes |= linear(f"{at}.out_proj", width, inner) | {f"{at}.A_log": (inner, 16)}
        shapes |= linear(f"{at}.conv1d", inner, 4, bias=True)
    dims = split_dims(nested(shapes), 4)
    assert dims["embed.weight"] == dims["layers.1.mixer.in_proj.weight"] == 0
    assert dims["layers.1.mixer.out_proj.weight"] == 1
    assert dims["layers.1.mixer.x_proj.weight"] is None


def test_the_router_of_experts_is_whole():
    """Its few outputs are needed by every device."""
    shapes = {"embed.weight": (4096, 1024)}
    for at in ("layers.0", "layers.1"):
        shapes |= linear(f"{at}.moe.gate", 8, 1024)
        shapes |= linear(f"{at}.moe.experts.0.w1", 3584, 1024)
        shapes |= linear(f"{at}.moe.experts.0.w2", 1024, 3584)
    dims = split_dims(nested(shapes), 4)
    assert dims["layers.0.moe.gate.weight"] is None
    assert dims["layers.0.moe.experts.0.w1.weight"] == 0
    assert dims["layers.0.moe.experts.0.w2.weight"] == 1


def test_queries_beside_a_feed_forward_network_are_not_keys():
    """They are narrower than its hidden size, and divided by their own number of heads."""

    class Parallel(eqx.Module):
        wq: jax.ShapeDtypeStruct
        wk: jax.ShapeDtypeStruct
        wv: jax.ShapeDtypeStruct
        wo: jax.ShapeDtypeStruct
        up: jax.ShapeDtypeStruct
        down: jax.ShapeDtypeStruct
        heads: int
        kv_heads: int

    sizes = [(512, 512), (512, 64), (512, 64), (512, 512), (512, 2048), (2048, 512)]
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in sizes]
    tree = {
        "embed": jax.ShapeDtypeStruct((4096, 512), np.float32),
        "layers": [Parallel(*arrays, heads=8, kv_heads=1)],
    }
    dims = split_dims(tree, 4)
    assert dims["layers.0.wq"] == dims["layers.0.up"] == 1
    assert dims["layers.0.wo"] == dims["layers.0.down"] == 0
    assert dims["layers.0.wk"] is None


@pytest.mark.parametrize("name", SMALL)
def test_agrees_with_megatron_on_flax_names_and_order(name):
    family = name.split()[0]
    flax = as_flax(SMALL[name], family)
    expected = {}
    for key, (_, torch_name) in flax.items():
        dim = torch_name and megatron(family, torch_name, SMALL[name][torch_name], 4)
        turned = key.endswith(".kernel") and family != "gpt2"
        expected[key] = dim if dim is None or not turned else 1 - dim
    shapes = {key: shape for key, (shape, _) in flax.items()}
    share, wrong = agreement(shapes, split_dims(nested(shapes), 4), expected)
    assert share == 1, wrong


@pytest.mark.parametrize("name", SMALL)
def test_agrees_with_megatron_on_stacked_layers(name):
    """Layers stacked along a leading dimension, as a scan reads them, split one dimension later."""
    family, stacked, expected = name.split()[0], {}, {}
    blocks = [re.sub(r"\.(layers|h|block|layer)\.0\.(?!\d)", r".\1.", f".{k}") for k in SMALL[name]]
    for (key, shape), block in zip(SMALL[name].items(), blocks, strict=True):
        dim = megatron(family, key, shape, 4)
        if re.search(r"\.(layers|h|block|layer)\.1\.", f".{key}") and family != "t5":
            continue
        inside = block != f".{key}" and family != "t5"
        stacked[block[1:] if inside else key] = (2, *shape) if inside else shape
        expected[block[1:] if inside else key] = dim + 1 if inside and dim is not None else dim
    share, wrong = agreement(stacked, split_dims(nested(stacked), 4), expected)
    assert share == 1, wrong


@pytest.mark.parametrize("name", SMALL)
def test_agrees_with_megatron_where_names_say_nothing(name):
    """Only which of four square matrices is the output of an attention is not told by sizes."""
    family, renamed = name.split()[0], {}
    words = sorted({part for key in SMALL[name] for part in key.split(".")})
    kept = r"\d+|weight|bias|o|o_proj|out_proj"
    names = {word: word if re.fullmatch(kept, word) else f"x{i}y" for i, word in enumerate(words)}
    for key, shape in SMALL[name].items():
        renamed[".".join(names[part] for part in key.split("."))] = shape, key
    shapes = {new: shape for new, (shape, _) in renamed.items()}
    expected = {new: megatron(family, key, shape, 4) for new, (shape, key) in renamed.items()}
    share, wrong = agreement(shapes, split_dims(nested(shapes), 4), expected)
    assert share == 1, wrong
