"""GGUF files: against the package's own reader, and the perplexity of a real model."""

import shutil
import sys
from math import ceil

import equinox as eqx
import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from published import formula
from registry import experiment, moby_dick, smollm2

import redcoast as rc
from redcoast.models import Llama, LlamaConfig, RopeScaling
from redcoast.models._rotary import rotary_frequencies
from redcoast.pretrained.gguf._file import read_gguf
from redcoast.pretrained.gguf._llama import fit_llama3
from redcoast.pretrained.hf._rope import read_rope

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q6_K]
WIDTH, HEADS, KV_HEADS, LAYERS, HIDDEN, VOCAB = 64, 4, 2, 3, 96, 80
TENSORS = 3 + 9 * LAYERS
METADATA = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": HIDDEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "rope.dimension_count": WIDTH // HEADS,
    "vocab_size": VOCAB,
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def write_tensor(writer, name, values, kind):
    if kind is Kind.Q6_K:  # which the package can only read: numbers of 6 bits, and scales
        blocks = np.random.default_rng(0).integers(0, 256, (48, 2, 210)).astype(np.uint8)
        blocks[..., -2:] = np.array(0.01, np.float16)[None].view(np.uint8)
        return writer.add_tensor(name, blocks.reshape(48, 420), raw_dtype=kind)
    if kind is Kind.F32:
        return writer.add_tensor(name, values)
    return writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file of tensors of every kind, and of metadata of every type."""
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"uint{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"int{bits}", -(2 ** (bits - 1)))
    writer.add_float32("float32", 0.1)
    writer.add_float64("float64", 0.1)
    writer.add_bool("bool", True)
    writer.add_string("string", "naïve ☕")
    writer.add_array("words", ["a", "", "ünï"])
    writer.add_array("numbers", [3, -4, 5])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_uint32("general.alignment", 64)
    writer.data_alignment = 64
    for kind in KINDS:
        write_tensor(writer, kind.name, formula(kind.name, (48, 512)), kind)
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_part_of_a_tensor_is_what_the_package_dequantises(mixed, kind):
    tensors = {x.name: x for x in gguf.GGUFReader(mixed).tensors}
    whole = gguf.dequantize(tensors[kind.name].data, kind)
    stored = read_gguf(mixed).stored[kind.name]
    assert stored.shape == whole.shape == (48, 512)
    for box in (np.s_[0:48, 0:512], np.s_[3:5, 0:512], np.s_[0:48, 37:300], np.s_[7:8, 256:257]):
        np.testing.assert_array_equal(stored.take(box).astype(np.float32), whole[box])
    np.testing.assert_array_equal(read_gguf(mixed).stored["vector"].take(np.s_[1:4,]), [1, 2, 3])


def tensors_of_llama(tied):
    """Tensors of a LLaMA under their names at Hugging Face."""
    shapes = {"model.embed_tokens": (VOCAB, WIDTH), "model.norm": (WIDTH,)}
    if not tied:
        shapes["lm_head"] = (VOCAB, WIDTH)
    for i in range(LAYERS):
        name = f"model.layers.{i}."
        kv = WIDTH * KV_HEADS // HEADS
        shapes |= {name + f"self_attn.{x}_proj": (WIDTH, WIDTH) for x in "qo"}
        shapes |= {name + f"self_attn.{x}_proj": (kv, WIDTH) for x in "kv"}
        shapes |= {name + f"mlp.{x}_proj": (HIDDEN, WIDTH) for x in ("gate", "up")}
        shapes |= {name + "mlp.down_proj": (WIDTH, HIDDEN)}
        shapes |= {name + f"{x}_layernorm": (WIDTH,) for x in ("input", "post_attention")}
    return {name: formula(name, shape) for name, shape in shapes.items()}


def interleave(x, heads):
    """The order of rows in GGUF, as llama.cpp's converter makes it."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(x.shape))


def write_llama(path, *, tied=False, architecture="llama", more=(), parts=1, metadata=()):
    path.parent.mkdir(exist_ok=True)
    each = ceil(TENSORS / parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=each)
    for name, value in (METADATA | dict(metadata)).items():
        if value is not None:
            add = {str: writer.add_string, list: writer.add_array}.get(
                type(value), writer.add_uint32
            )
            add(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 50_000)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    tensors = tensors_of_llama(tied)
    writer.add_tensor("token_embd.weight", tensors["model.embed_tokens"])
    writer.add_tensor("output_norm.weight", tensors["model.norm"])
    if not tied:
        writer.add_tensor("output.weight", tensors["lm_head"])
    for i in range(LAYERS):
        for name, published in NAMES.items():
            x = tensors[f"model.layers.{i}.{published}"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            writer.add_tensor(f"blk.{i}.{name}.weight", interleave(x, heads) if heads else x)
    for name in more:
        x = more[name] if isinstance(more, dict) else np.ones(3, np.float32)
        writer.add_tensor(name, x)
    finish(writer)
    return path


def written(tied):
    """The arrays that the model should have."""
    tensors = tensors_of_llama(tied)
    stack = lambda name: np.stack([tensors[f"model.layers.{i}.{name}"] for i in range(LAYERS)])
    into = lambda name: stack(name).reshape(LAYERS, -1, 16, WIDTH).transpose(0, 3, 1, 2)
    actual = {
        "wq": into("self_attn.q_proj"),
        "wk": into("self_attn.k_proj"),
        "wv": into("self_attn.v_proj"),
        "wo": stack("self_attn.o_proj").swapaxes(1, 2).reshape(LAYERS, HEADS, 16, WIDTH),
        "gate": stack("mlp.gate_proj").swapaxes(1, 2),
        "up": stack("mlp.up_proj").swapaxes(1, 2),
        "down": stack("mlp.down_proj").swapaxes(1, 2),
        "attention_norm": stack("input_layernorm"),
        "mlp_norm": stack("post_attention_layernorm"),
    }
    return actual, tensors


@pytest.mark.few("False-mesh2")
@pytest.mark.parametrize("mesh", [None, {"model": 4}, {"fsdp": 8}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_is_what_it_was_before_it_was_converted(tmp_path, tied, mesh):
    path = write_llama(tmp_path / "model.gguf", tied=tied)
    mesh = None if mesh is None else rc.make_mesh(**mesh)
    # A directory with just the one file is as good as the file.
    model = rc.load_pretrained(path if mesh is None else tmp_path, mesh=mesh)
    assert isinstance(model, Llama)
    layers, others = written(tied)
    for name, x in layers.items():
        np.testing.assert_array_equal(np.asarray(getattr(model.layers, name)), x, err_msg=name)
    np.testing.assert_array_equal(np.asarray(model.embed), others["model.embed_tokens"])
    np.testing.assert_array_equal(np.asarray(model.norm), others["model.norm"])
    assert tied == (model.head is None)
    if model.head is not None:
        np.testing.assert_array_equal(np.asarray(model.head), others["lm_head"].T)
    assert model.config == LlamaConfig(
        vocab=VOCAB,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        hidden=HIDDEN,
        rope_base=50_000.0,
        norm_eps=1e-5,  # and not the number nearest to it that has 32 bits
        tied=tied,
        context=128,
        bos=1,
        eos=(2,),
    )


def test_a_model_of_gguf_is_saved_for_hugging_face(tmp_path):
    model = rc.load_pretrained(write_llama(tmp_path / "model.gguf"))
    rc.save_pretrained(model, tmp_path / "model")
    again = rc.load_pretrained(tmp_path / "model")
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_head_may_have_another_size_than_the_width_says(tmp_path):
    path = write_llama(tmp_path / "model.gguf", metadata={"attention.key_length": 16})
    assert rc.load_pretrained(path).config.head_dim == 16
    odd = {"attention.key_length": 32, "rope.dimension_count": 16}
    with pytest.raises(ValueError, match="rope.dimension_count` is 16"):
        rc.load_pretrained(write_llama(tmp_path / "odd.gguf", metadata=odd))


SCALED = RopeScaling("llama3", 8.0, original=32)


@pytest.mark.parametrize("scaling", [SCALED, RopeScaling("llama3", 32.0, high=8.0), None], ids=str)
def test_factors_of_rotary_embeddings_are_those_of_llama3(scaling, tmp_path):
    """Files of Llama 3.1 and later hold them in place of settings; 128 features, as there."""
    plain = rotary_frequencies(128, 500_000.0)
    factors = plain / rotary_frequencies(128, 500_000.0, scaling)
    actual = fit_llama3(tmp_path, factors.astype(np.float32).astype(float), 500_000.0)
    assert read_rope(actual) == scaling


def test_scaled_rotary_embeddings_are_read(tmp_path):
    factors = rotary_frequencies(16, 5e4) / rotary_frequencies(16, 5e4, SCALED)
    more = {"rope_freqs.weight": factors.astype(np.float32)}
    config = rc.load_pretrained(write_llama(tmp_path / "freqs.gguf", more=more)).config
    assert config.rope_scaling == SCALED
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4}
    config = rc.load_pretrained(write_llama(tmp_path / "linear.gguf", metadata=linear)).config
    assert config.rope_scaling == RopeScaling("linear", 4)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4}
    yarn |= {"rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 16}
    config = rc.load_pretrained(write_llama(tmp_path / "yarn.gguf", metadata=yarn)).config
    actual = config.rope_scaling
    assert (actual.factor, actual.original, actual.fast, actual.slow) == (4, 32, 16, 1)
    more = {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}
    with pytest.raises(ValueError, match="differ from Llama 3's scaling"):
        rc.load_pretrained(write_llama(tmp_path / "odd.gguf", more=more))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2', but for GGUF files only 'llama'"),
        ({"metadata": {"expert_count": 8}}, "`llama.expert_count` is 8"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "`llama.rope.scaling.type` is 'yarn'"),
        ({"metadata": {"attention.head_count": [2, 1, 2]}}, r"head_count` \[2, 1, 2\], but only"),
        ({"metadata": {"attention.head_count": 0}}, "head_count` 0, but only"),
        ({"metadata": {"attention.head_count_kv": [2, 1, 2]}}, r"head_count_kv` is \[2, 1, 2\]"),
        ({"metadata": {"feed_forward_length": None}}, "intermediate_size` is missing"),
        ({"more": ["rope_freqs.weight", "blk.0.attn_q.bias"]}, "Unexpected: rope_freqs.*attn_q"),
        (
            {"metadata": {"feed_forward_length": 64}},
            r"Misshapen: blk.0.ffn_gate.weight .*\(64, 64\)",
        ),
        ({"metadata": {"block_count": 4}}, "Missing: blk.3.attn_norm.weight"),
    ],
)
def test_files_of_other_models_are_refused_by_name(tmp_path, changes, words):
    path = write_llama(tmp_path / "model.gguf", **changes)
    with pytest.raises(ValueError, match=f"model.gguf.*{words}"):
        rc.load_pretrained(path)


@pytest.mark.parametrize("kept", [3, 7, 30, 500, -50])
def test_files_that_are_cut_short(tmp_path, kept):
    path = write_llama(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match="model.gguf is damaged"):
        rc.load_pretrained(path)


def test_a_directory_of_several_files(tmp_path):
    for name in ("a", "b"):
        write_llama(tmp_path / f"{name}.gguf")
    with pytest.raises(ValueError, match="several `.gguf` files: pass the path of one"):
        rc.load_pretrained(tmp_path)


def test_a_model_that_is_split_into_files(tmp_path):
    """The other files hold only their numbers and their tensors. Any of them names the model."""
    write_llama(tmp_path / "model.gguf", parts=4)
    names = [f"model-{i:05}-of-00004.gguf" for i in range(1, 5)]
    assert sorted(x.name for x in tmp_path.iterdir()) == names
    whole = rc.load_pretrained(write_llama(tmp_path / "whole" / "model.gguf"))
    for path in (tmp_path / names[0], tmp_path / names[2]):
        jax.tree.map(np.testing.assert_array_equal, rc.load_pretrained(path), whole)
    shutil.rmtree(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, rc.load_pretrained(tmp_path), whole)
    shutil.copy(tmp_path / names[1], tmp_path / "second.gguf")
    with pytest.raises(ValueError, match="second.gguf is one of 4 files.*found by their names"):
        rc.load_pretrained(tmp_path / "second.gguf")
    with pytest.raises(ValueError, match="several `.gguf` files: pass the path of one"):
        rc.load_pretrained(tmp_path)
    shutil.move(tmp_path / "second.gguf", tmp_path / names[2])
    with pytest.raises(ValueError, match="00003-of-00004.gguf is not part 3 .* `split.no` is 1"):
        rc.load_pretrained(tmp_path / names[0])
    (tmp_path / names[2]).unlink()
    with pytest.raises(ValueError, match="lacks model-00003-of-00004.gguf. Download"):
        rc.load_pretrained(tmp_path)


def test_without_the_package_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    path = write_llama(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'redcoast\[gguf\]'"):
        rc.load_pretrained(path)


@eqx.filter_jit
def perplexity(model, tokens):
    """Of each token of a text behind those before it."""
    logits = jax.nn.log_softmax(model(tokens[None])[0, :-1])
    return jnp.exp(-jnp.mean(jnp.take_along_axis(logits, tokens[1:, None], axis=1)))


@pytest.mark.weights
@pytest.mark.parametrize("mesh", [None, {"model": 4}])
def test_smollm2_reads_moby_dick(mesh):
    file, text = smollm2(), moby_dick()
    tokens = experiment("_published").read_tokenizer(file).encode(text[:9000]).ids[:1024]
    model = rc.load_pretrained(file, mesh=mesh and rc.make_mesh(**mesh))
    assert model.config.tied
    # Without putting the rows of Q and K back it would be 322.
    assert float(perplexity(model, jnp.asarray(tokens))) == pytest.approx(62.7, rel=0.02)
