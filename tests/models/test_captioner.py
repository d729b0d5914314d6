"""The captioner: its parts joined, its cache, and what published files say of it."""

import dataclasses

import decoder_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import TOKENS, VOCAB, close, make
from random_models import to_device
from safetensors.numpy import load_file

import redcoast as rc
from redcoast.models.captioner import Captioner, CaptionerConfig
from redcoast.models.gpt2 import GPT2Config
from redcoast.models.vit import ViTConfig
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained.hf import captioner as hf_captioner

ENCODER = ViTConfig(width=12, layers=2, heads=2, hidden=24, image=(4, 4), patch=(2, 2))
DECODER = GPT2Config(
    VOCAB, 16, layers=2, heads=4, hidden=24, positions=11, cross_attention=True, eos=(5,)
)
CONFIG = CaptionerConfig(ENCODER, DECODER, decoder_start=1, eos=(5,), pad=0)
MODEL = make(Captioner, CONFIG)
PIXELS = to_device(np.random.default_rng(0).normal(0, 1, (2, 3, 4, 4)), np.float32)
MASK = jnp.array([[1] * 7, [1] * 5 + [0] * 2])


@helpers.jit
def logits_of(model, pixels, tokens, **options):
    return model(pixels, tokens, **options)


@pytest.mark.thorough
def test_is_the_decoder_with_the_encoder_as_its_memory():
    @helpers.jit
    def joined(model, pixels, tokens, mask):
        memory = model.encoder(pixels) @ model.bridge.w + model.bridge.b[None, None]
        return memory, model.decoder(tokens, mask=mask, memory=memory)

    memory, logits = joined(MODEL, PIXELS, TOKENS, MASK)
    close(helpers.jit(Captioner.encode)(MODEL, PIXELS), memory, 1e-4)
    close(logits_of(MODEL, PIXELS, TOKENS, decoder_mask=MASK), logits, 1e-4)


@pytest.mark.thorough
def test_has_no_bridge_between_equal_widths():
    model = make(Captioner, CONFIG, encoder=dataclasses.replace(ENCODER, width=16))
    assert model.bridge is None
    assert logits_of(model, PIXELS, TOKENS).shape == (2, 7, VOCAB)


@pytest.mark.thorough
def test_padding_of_captions_changes_nothing():
    expected = logits_of(MODEL, PIXELS, TOKENS)
    for before, behind in ((3, 0), (0, 3)):
        widths = ((0, 0), (before, behind))
        tokens, mask = jnp.pad(TOKENS, widths), jnp.pad(jnp.ones_like(TOKENS), widths)
        actual = logits_of(MODEL, PIXELS, tokens, decoder_mask=mask)
        close(actual[:, before : before + 7], expected)


@pytest.mark.thorough
def test_cache_gives_what_all_at_once_does():
    expected = logits_of(MODEL, PIXELS, TOKENS)
    cache = MODEL.init_cache(2, 8, memory=helpers.jit(Captioner.encode)(MODEL, PIXELS))
    actual = []
    for part in (slice(0, 4), slice(4, 5), slice(5, 7)):
        logits, cache = helpers.decode(MODEL, TOKENS[:, part], cache)
        actual.append(logits)
    close(jnp.concatenate(actual, axis=1), expected)


@pytest.mark.thorough
def test_generates_the_likeliest_captions():
    actual = rc.generate(MODEL, PIXELS, max_new_tokens=4, eos=())
    tokens = jnp.ones((2, 7), jnp.int32)
    for i in range(4):
        best = jnp.argmax(logits_of(MODEL, PIXELS, tokens)[:, i], axis=-1)
        tokens = tokens.at[:, i + 1].set(best.astype(jnp.int32))
    np.testing.assert_array_equal(actual, tokens[:, 1:5])


@pytest.mark.thorough
def test_dropout_by_key():
    plain = logits_of(MODEL, PIXELS, TOKENS)
    # Keys of this kind take less to compile.
    keys = [jax.random.key(seed, impl="unsafe_rbg") for seed in (0, 1)]
    one, two = (logits_of(MODEL, PIXELS, TOKENS, key=key) for key in keys)
    assert min(jnp.max(jnp.abs(one - plain)), jnp.max(jnp.abs(one - two))) > 1e-3
    rates = ("embed_dropout", "residual_dropout", "attention_dropout")
    decoder = dataclasses.replace(DECODER, **dict.fromkeys(rates, 0.0))
    encoder = dataclasses.replace(ENCODER, dropout=0.5)
    model = make(Captioner, CONFIG, encoder=encoder, decoder=decoder)
    close(logits_of(model, PIXELS, TOKENS), plain)
    dropped = logits_of(model, PIXELS, TOKENS, key=keys[0])
    assert jnp.max(jnp.abs(dropped - plain)) > 1e-3


@pytest.mark.thorough
def test_is_split_over_a_mesh():
    encoder = dataclasses.replace(ENCODER, width=32, heads=4, hidden=128)
    decoder = dataclasses.replace(DECODER, width=64, hidden=256)
    model = make(Captioner, CONFIG, encoder=encoder, decoder=decoder)
    batch = (jnp.tile(PIXELS, (2, 1, 1, 1)), jnp.tile(TOKENS, (2, 1)))

    def loss_fn(model, pixels, tokens):
        return jnp.mean(jnp.sin(model(pixels, tokens)))

    mesh = rc.make_mesh(data=2, model=4)
    plan = rc.plan_shardings(model, mesh, fn=loss_fn, args=batch)
    leaves, places = jax.tree.leaves(model), jax.tree.leaves(plan.shardings)
    split = sum(x.size for x, s in zip(leaves, places, strict=True) if "model" in str(s.spec))
    assert split >= 0.9 * sum(x.size for x in leaves)
    loss = helpers.jit(loss_fn)(model, *batch)
    planned = helpers.jit(plan.constrain(loss_fn))(jax.device_put(model, plan.shardings), *batch)
    assert abs(float(loss) - float(planned)) < 1e-5


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="encoder of a captioner must have no head"):
        CaptionerConfig(dataclasses.replace(ENCODER, head="classification"), DECODER)
    with pytest.raises(ValueError, match="decoder of a captioner must have `cross_attention=True`"):
        CaptionerConfig(ENCODER, dataclasses.replace(DECODER, cross_attention=False))


def test_settings_are_read_back():
    assert read_config(CaptionerConfig, write_config(CONFIG)) == dataclasses.replace(
        CONFIG, encoder=dataclasses.replace(ENCODER, pooler=True)
    )
    assert (CONFIG.vocab, CONFIG.positions) == (VOCAB, 11)


def test_token_ids_are_the_decoders_unless_they_are_said():
    settings = write_config(CONFIG)
    silent = {name: value for name, value in settings.items() if not name.endswith("_token_id")}
    silent["decoder"] = settings["decoder"] | {"bos_token_id": 7, "eos_token_id": 8}
    config = read_config(CaptionerConfig, silent)
    assert (config.decoder_start, config.bos, config.eos) == (7, 7, (8,))
    said = read_config(CaptionerConfig, silent | {"decoder_start_token_id": 3})
    assert (said.decoder_start, said.bos) == (3, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": True}, "`rotary`, which is True, is unknown"),
        ({"is_encoder_decoder": False}, "`is_encoder_decoder` is False"),
        ({"encoder": {"model_type": "swin"}}, "`model_type` is 'swin'"),
        ({"decoder": {"model_type": "bert"}}, "`model_type` is 'bert'"),
        ({"architectures": ["SpeechEncoderDecoderModel"]}, "only VisionEncoderDecoderModel"),
    ],
)
def test_settings_that_would_change_results_are_refused(change, message):
    settings = write_config(CONFIG)
    parts = {
        name: settings[name] | change[name] for name in ("encoder", "decoder") if name in change
    }
    with pytest.raises(ValueError, match=message):
        read_config(CaptionerConfig, settings | change | parts)


@pytest.mark.thorough
def test_is_saved_under_published_names_and_read_back(tmp_path):
    model = make(Captioner, CONFIG, encoder=dataclasses.replace(ENCODER, pooler=True))
    rc.save_pretrained(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names >= {
        "enc_to_dec_proj.weight",
        "encoder.encoder.layer.1.attention.attention.value.bias",
        "encoder.pooler.dense.weight",
        "decoder.transformer.h.1.crossattention.q_attn.weight",
        "decoder.transformer.wte.weight",
    }
    actual = rc.load_pretrained(tmp_path)
    assert actual.config == model.config
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not hf_captioner.settle(model.config, ["encoder.layernorm.bias"]).encoder.pooler
    copies = hf_captioner.duplicates(model.config)
    assert copies["decoder.lm_head.weight"] == "decoder.transformer.wte.weight"


def test_example_inputs_are_images_and_captions():
    pixels, tokens = hf_captioner.example_inputs(CONFIG, 4)
    assert (pixels.shape, tokens.shape) == ((4, 3, 4, 4), (4, 11))
