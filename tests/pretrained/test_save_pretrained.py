"""Models to published weights: what the library of safetensors reads, and what stays undone."""

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tracemalloc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import few_of
from published import formula
from safetensors import safe_open
from safetensors.numpy import load_file

import redcoast as rc
from redcoast import lora
from redcoast.models import (
    GPT2,
    GPTJ,
    OPT,
    T5,
    Bart,
    BartConfig,
    Bert,
    BertConfig,
    Captioner,
    CaptionerConfig,
    Clip,
    ClipConfig,
    ClipImageConfig,
    ClipTextConfig,
    DeepseekV3,
    DeepseekV3Config,
    Dinov2,
    Dinov2Config,
    Dinov3,
    Dinov3Config,
    Gemma,
    Gemma4,
    Gemma4Config,
    GemmaConfig,
    Glm4Moe,
    Glm4MoeConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoX,
    GPTNeoXConfig,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaConfig,
    Mamba2,
    Mamba2Config,
    Mixtral,
    MixtralConfig,
    ModernBert,
    ModernBertConfig,
    OPTConfig,
    Phi3,
    Phi3Config,
    Qwen3_5,
    Qwen3_5Config,
    Siglip,
    SiglipConfig,
    SiglipImageConfig,
    SiglipTextConfig,
    T5Config,
    ViT,
    ViTConfig,
    Whisper,
    WhisperConfig,
)
from redcoast.pretrained._registry import write_config
from redcoast.pretrained._safetensors import write_safetensors

CONFIG = LlamaConfig(vocab=96, width=64, layers=3, heads=8, kv_heads=4, hidden=128, eos=(2,))


def make(model_class, config, dtype=np.float32):
    """A model whose arrays depend on their paths alone."""
    abstract = eqx.filter_eval_shape(model_class, config, key=jax.random.key(0))

    def fill(path, x):
        return jnp.asarray(formula(jax.tree_util.keystr(path), x.shape), dtype)

    return jax.tree_util.tree_map_with_path(fill, abstract)


def place(model, /, **mesh):
    mesh = rc.make_mesh(**mesh)
    return jax.device_put(model, rc.infer_shardings(model, mesh))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.few("bfloat16")
def test_what_is_saved_is_read_by_the_library(tmp_path, dtype):
    model = make(Llama, CONFIG, dtype)
    rc.save_pretrained(model, tmp_path / "model")
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    with safe_open(tmp_path / "model" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert len(file.keys()) == 3 + 9 * 3
        q = file.get_tensor("model.layers.1.self_attn.q_proj.weight")
        head = file.get_tensor("lm_head.weight")
    assert q.dtype == head.dtype == dtype
    wq = np.asarray(model.layers.wq[1]).astype(np.float32)
    np.testing.assert_array_equal(q.astype(np.float32), np.moveaxis(wq, 0, 2).reshape(64, 64))
    assert model.head is not None
    np.testing.assert_array_equal(head, np.asarray(model.head).T)
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    assert settings == write_config(CONFIG) | {"torch_dtype": np.dtype(dtype).name}


FAMILIES = {
    "llama": (Llama, CONFIG),
    "gpt2": (GPT2, GPT2Config(vocab=96, width=64, layers=2, heads=8, hidden=128, positions=32)),
    "gptj": (GPTJ, GPTJConfig(vocab=96, width=64, layers=2, heads=4, hidden=128, rotary_dim=8)),
    "gpt_neox": (
        GPTNeoX,
        GPTNeoXConfig(vocab=96, width=64, layers=2, heads=4, hidden=128, rotary_dim=8),
    ),
    "gemma": (
        Gemma,
        GemmaConfig(
            vocab=96,
            width=64,
            layers=2,
            heads=8,
            kv_heads=4,
            hidden=96,
            head_dim=16,
            local=(True, False),
            window=8,
            local_rope_base=100.0,
            post_norms=True,
            qk_norm=True,
        ),
    ),
    "gpt_oss": (
        GptOss,
        GptOssConfig(
            vocab=96,
            width=64,
            layers=2,
            heads=8,
            kv_heads=4,
            hidden=96,
            experts=4,
            local=(True, False),
            window=8,
        ),
    ),
    "deepseek_v3": (
        DeepseekV3,
        DeepseekV3Config(
            vocab=96,
            width=64,
            layers=3,
            heads=8,
            hidden=96,
            expert_hidden=32,
            dense_layers=1,
            experts=8,
            chosen=2,
            groups=4,
            chosen_groups=2,
            q_rank=32,
            kv_rank=16,
            plain_size=8,
            rope_size=4,
            value_size=8,
        ),
    ),
    "glm4_moe": (
        Glm4Moe,
        Glm4MoeConfig(
            vocab=96,
            width=64,
            layers=3,
            heads=8,
            hidden=96,
            expert_hidden=32,
            experts=8,
            chosen=2,
            kv_heads=4,
            qkv_bias=True,
            qk_norm=True,
        ),
    ),
    "gemma4": (
        Gemma4,
        Gemma4Config(
            vocab=96,
            width=64,
            layers=4,
            heads=8,
            kv_heads=4,
            hidden=96,
            head_dim=16,
            global_head_dim=32,
            local=(True, False, True, False),
            shared_layers=2,
            layer_size=16,
        ),
    ),
    "qwen3_5": (
        Qwen3_5,
        Qwen3_5Config(
            vocab=96,
            width=64,
            layers=2,
            heads=8,
            kv_heads=4,
            hidden=96,
            head_size=16,
            linear=(True, False),
            key_heads=4,
            value_heads=8,
            key_size=8,
            value_size=8,
        ),
    ),
    "mamba2": (
        Mamba2,
        Mamba2Config(vocab=96, width=64, layers=2, heads=16, head_size=8, state=16, groups=4),
    ),
    "opt": (OPT, OPTConfig(vocab=96, width=64, layers=2, heads=8, hidden=128, positions=32)),
    "mixtral": (
        Mixtral,
        MixtralConfig(vocab=96, width=64, layers=2, heads=8, kv_heads=4, hidden=96, experts=4),
    ),
    "phi3": (Phi3, Phi3Config(vocab=96, width=64, layers=2, heads=8, kv_heads=4, hidden=128)),
    "t5": (T5, T5Config(vocab=96, width=64, layers=2, decoder_layers=3, heads=8, hidden=128)),
    "bart": (
        Bart,
        BartConfig(
            vocab=96, width=64, layers=2, decoder_layers=3, heads=8, hidden=128, positions=128
        ),
    ),
    "bert": (
        Bert,
        BertConfig(
            vocab=96, width=64, layers=2, heads=8, hidden=128, positions=32, head="classification"
        ),
    ),
    "modernbert": (
        ModernBert,
        ModernBertConfig(vocab=96, width=64, layers=3, heads=8, hidden=96, head="masked"),
    ),
    "dinov2": (
        Dinov2,
        Dinov2Config(width=64, layers=2, heads=8, image=32, patch=8, registers=2, gated=True),
    ),
    "dinov3": (
        Dinov3,
        Dinov3Config(width=64, layers=2, heads=8, hidden=96, image=32, patch=8, gated=True),
    ),
    "clip": (
        Clip,
        ClipConfig(
            ClipImageConfig(width=64, layers=2, heads=8, hidden=96, image=32, patch=8),
            ClipTextConfig(vocab=96, width=32, layers=3, heads=4, hidden=96, eos=(95,)),
            outputs=64,
        ),
    ),
    "siglip": (
        Siglip,
        SiglipConfig(
            SiglipImageConfig(width=64, layers=2, heads=8, hidden=96, image=32, patch=8),
            SiglipTextConfig(vocab=96, width=32, layers=3, heads=4, hidden=96, outputs=64),
        ),
    ),
    "vit": (ViT, ViTConfig(width=64, layers=2, heads=8, hidden=128, image=(32, 32), patch=(8, 8))),
    "whisper": (
        Whisper,
        WhisperConfig(
            vocab=96, width=64, layers=2, decoder_layers=3, heads=8, hidden=128, mels=8, frames=32
        ),
    ),
    "captioner": (
        Captioner,
        CaptionerConfig(
            ViTConfig(width=64, layers=2, heads=8, hidden=128, image=(32, 32), patch=(8, 8)),
            GPT2Config(
                vocab=96,
                width=64,
                layers=2,
                heads=8,
                hidden=128,
                positions=32,
                cross_attention=True,
            ),
        ),
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("family", few_of(FAMILIES, "llama"))
def test_every_family_goes_to_files_and_back_onto_a_mesh(tmp_path, family):
    model_class, config = FAMILIES[family]
    model = make(model_class, config)
    rc.save_pretrained(model, tmp_path / "model")
    mesh = rc.make_mesh(model=4)
    loaded = rc.load_pretrained(tmp_path / "model", mesh=mesh)
    for x, y in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert {x.sharding.mesh for x in jax.tree.leaves(loaded)} == {mesh}
    assert not all(x.sharding.is_fully_replicated for x in jax.tree.leaves(loaded))


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"model": 4}, {"fsdp": 8}, {"fsdp": 2, "model": 2}])
def test_a_split_model_makes_the_same_files(tmp_path, mesh):
    model = make(GPT2, FAMILIES["gpt2"][1])
    rc.save_pretrained(model, tmp_path / "whole")
    rc.save_pretrained(place(model, **mesh), tmp_path / "split")
    whole, split = (tmp_path / x / "model.safetensors" for x in ("whole", "split"))
    assert whole.read_bytes() == split.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "qk_norm": True},
        {"output_norms": True},
        {"rope_layers": (True, False, True), "window": 4},
    ],
)
def test_options_of_several_architectures_are_refused(options):
    with pytest.raises(ValueError, match="No published architecture has this combination"):
        write_config(dataclasses.replace(CONFIG, **options))


def test_rotary_features_that_a_ratio_does_not_give_back_are_refused():
    config = Phi3Config(96, 88, layers=2, heads=2, kv_heads=2, hidden=96, rotary_dim=22)
    written = write_config(config)
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.5
    with pytest.raises(ValueError, match="`rotary_dim` of 30 cannot be saved"):
        write_config(dataclasses.replace(config, rotary_dim=30))


@pytest.mark.thorough
def test_above_a_size_there_are_several_files(tmp_path):
    model = place(make(Llama, CONFIG), model=4)
    most = 60_000
    rc.save_pretrained(model, tmp_path / "model", max_file_bytes=most)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "model").glob("*.safetensors"))
    n = len(files)
    assert n > 3
    assert files == [f"model-{i:05}-of-{n:05}.safetensors" for i in range(1, n + 1)]
    inside = {file: load_file(tmp_path / "model" / file) for file in files}
    assert index["weight_map"] == {name: file for file in files for name in inside[file]}
    sizes = {file: sum(x.nbytes for x in inside[file].values()) for file in files}
    assert max(sizes.values()) <= most
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert_same(rc.load_pretrained(tmp_path / "model").layers, make(Llama, CONFIG).layers)
    rc.save_pretrained(model, tmp_path / "each", max_file_bytes=1)
    assert len(list((tmp_path / "each").glob("*.safetensors"))) == 3 + 9 * 3


@pytest.mark.thorough
def test_the_host_holds_little_more_than_one_file(tmp_path):
    config = LlamaConfig(vocab=512, width=256, layers=12, heads=8, kv_heads=8, hidden=1024)
    model = place(make(Llama, config), fsdp=2, model=4)
    most = 4 * 4 * 256 * 1024
    rc.save_pretrained(model, tmp_path / "first", max_file_bytes=most)  # compiles
    tracemalloc.start()
    rc.save_pretrained(model, tmp_path / "model", max_file_bytes=most)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 10
    assert peak < 3 * most  # a file, the bytes of it that are written, and a tensor


def test_nothing_is_overwritten(tmp_path):
    model = make(Llama, CONFIG)
    (tmp_path / "empty").mkdir()
    rc.save_pretrained(model, tmp_path / "empty")
    before = {file: file.read_bytes() for file in (tmp_path / "empty").iterdir()}
    with pytest.raises(ValueError, match="empty exists already, and nothing is overwritten"):
        rc.save_pretrained(model, tmp_path / "empty")
    assert before == {file: file.read_bytes() for file in (tmp_path / "empty").iterdir()}
    with pytest.raises(ValueError, match="config.json exists already"):
        rc.save_pretrained(model, tmp_path / "empty" / "config.json")


def test_a_card_says_what_the_hub_reads_and_how_the_model_was_trained(tmp_path):
    facts = {"license": "mit", "language": ["en", "fr"], "tags": ["chat"], "data": "a | b\nc"}
    facts |= {"steps": 7, "final_loss": 2.123456789}
    rc.save_pretrained(make(Llama, CONFIG), tmp_path / "model", card=facts)
    _, front, text = (tmp_path / "model" / "README.md").read_text().split("---\n", 2)
    assert dict(line.split(": ", 1) for line in front.splitlines()) == {
        "library_name": '"transformers"',
        "pipeline_tag": '"text-generation"',
        "language": '["en", "fr"]',
        "license": '"mit"',
        "tags": '["chat", "redcoast"]',
    }
    assert "| data | a \\| b c |\n| steps | 7 |\n| final loss | 2.12346 |\n" in text
    sizes = [x.size for x in load_file(tmp_path / "model" / "model.safetensors").values()]
    assert f"`LlamaForCausalLM` with {sum(sizes):,} parameters" in text
    rc.load_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"license": 3}, "`card` has 'license': 3. It must be a string, or a list"),
        ({"tags": "one"}, "`card` has 'tags': 'one'. It must be a list of strings"),
    ],
)
def test_cards_that_the_hub_would_not_read(tmp_path, card, words):
    with pytest.raises(TypeError, match=words):
        rc.save_pretrained(make(Llama, CONFIG), tmp_path / "model", card=card)
    assert not (tmp_path / "model").exists()


def test_what_fails_half_way_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    model = make(Llama, CONFIG)

    def fail(path, shapes, arrays):
        if "00003" in path.name:
            raise OSError("No space left on device")
        write_safetensors(path, shapes, arrays)

    monkeypatch.setattr("redcoast.pretrained._save.write_safetensors", fail)
    with pytest.raises(OSError, match="No space"):
        rc.save_pretrained(model, tmp_path / "model", max_file_bytes=60_000)
    assert not (tmp_path / "model").exists()
    monkeypatch.undo()
    rc.save_pretrained(model, tmp_path / "model")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]
    assert_same(rc.load_pretrained(tmp_path / "model").layers, model.layers)


def _bfloat16(x):
    return x.astype(jnp.bfloat16)


def test_models_that_are_not_what_would_be_saved(tmp_path):
    model = make(Llama, CONFIG)
    adapted = lora.add_adapters(model, targets="w[qv]$", rank=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="layers/wq.* have adapters .LoRA.*Merge the adapters"):
        rc.save_pretrained(adapted, tmp_path / "model")
    with pytest.raises(ValueError, match="but got a dict"):
        rc.save_pretrained({"w": jnp.ones(3)}, tmp_path / "model")
    grown = eqx.tree_at(lambda m: m.embed, model, jnp.ones((100, 64)))
    with pytest.raises(ValueError, match=r"embed is \(100, 64\), but should be \(96, 64\)"):
        rc.save_pretrained(grown, tmp_path / "model")
    mixed = make(GPT2, FAMILIES["gpt2"][1])
    mixed = eqx.tree_at(lambda m: m.layers.attention.wk, mixed, replace_fn=_bfloat16)
    with pytest.raises(ValueError, match=r"c_attn.weight .*wq \(float32\), .*wk \(bfloat16\)"):
        rc.save_pretrained(mixed, tmp_path / "model")
    odd = make(Llama, dataclasses.replace(CONFIG, qkv_bias=True, qk_norm=True))
    with pytest.raises(ValueError, match="No published architecture"):
        rc.save_pretrained(odd, tmp_path / "model")
    assert not [*tmp_path.iterdir()]
    headless = eqx.tree_at(lambda m: m.head, model, None)
    with pytest.raises(ValueError, match="head is missing, but should be"):
        rc.save_pretrained(headless, tmp_path / "model")
    with pytest.raises(ValueError, match="abstract, without values"):
        rc.save_pretrained(jax.eval_shape(lambda: model), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


PROCESS = """
import sys
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
address, rank, source, path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.distributed.initialize(address, num_processes=2, process_id=rank)
import redcoast as rc
from redcoast.pretrained import _save as saving
written, write = [], saving.write_safetensors
saving.write_safetensors = lambda file, *rest: (written.append(file.name), write(file, *rest))
mesh = rc.make_mesh(fsdp=2, model=2)
model = rc.load_pretrained(source, mesh=mesh)
assert not model.layers.gate.is_fully_addressable
assert not model.layers.gate.sharding.is_fully_replicated
rc.save_pretrained(model, path, max_file_bytes=60_000)
try:
    rc.save_pretrained(model, path)
except ValueError as error:
    assert "nothing is overwritten" in str(error)
    print(*written)
"""


@pytest.mark.integration
def test_two_processes_load_and_save_together(tmp_path):
    model = make(Llama, CONFIG)
    rc.save_pretrained(model, tmp_path / "alone", max_file_bytes=60_000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    arguments = [str(tmp_path / "alone"), str(tmp_path / "together")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(rank), *arguments],
            env=os.environ | flags,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=900) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    files = sorted(file.name for file in (tmp_path / "alone").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "together").iterdir())
    for file in files:
        alone, together = (tmp_path / x / file for x in ("alone", "together"))
        assert alone.read_bytes() == together.read_bytes()
    first, second = (output.splitlines()[-1].split() for output, _ in results)
    tensors = [file for file in files if file.endswith(".safetensors")]
    assert first == tensors[::2]
    assert second == tensors[1::2]
