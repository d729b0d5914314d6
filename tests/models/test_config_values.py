"""Values that no model can have are refused where a configuration is made, or read."""

import copy
import dataclasses
import json
import math
from typing import Any, Literal

import jax
import pytest
from grids import few_of

import redcoast as rc
from redcoast.models import (
    BartConfig,
    BertConfig,
    CaptionerConfig,
    ClipConfig,
    ClipImageConfig,
    ClipTextConfig,
    DeepseekV3Config,
    Dinov2Config,
    Dinov3Config,
    Gemma4Config,
    GemmaConfig,
    Glm4MoeConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    Llama,
    LlamaConfig,
    LongRope,
    Mamba2Config,
    MixtralConfig,
    ModernBertConfig,
    OPTConfig,
    Phi3Config,
    Qwen3_5Config,
    RopeScaling,
    SiglipConfig,
    SiglipImageConfig,
    SiglipTextConfig,
    T5Config,
    ViTConfig,
    WhisperConfig,
)
from redcoast.models._check_config import check_fields
from redcoast.pretrained._registry import hf_names, read_config, write_config
from redcoast.pretrained._settings import names_of

SIZES: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "hidden": 24}
TEXT: dict[str, Any] = {**SIZES, "vocab": 11}
CONFIGS = {
    "bart": BartConfig(**TEXT, decoder_layers=2, bos=0, pad=1),
    "bert": BertConfig(**TEXT, pad=0),
    "deepseek_v3": DeepseekV3Config(**TEXT, expert_hidden=8, dense_layers=1),
    "dinov2": Dinov2Config(16, 2, 2, image=4, patch=2),
    "dinov3": Dinov3Config(16, 2, 2, 24, image=4, patch=2),
    "gemma": GemmaConfig(**TEXT, kv_heads=1, head_dim=8),
    "gemma4": Gemma4Config(**TEXT, kv_heads=1, head_dim=8, global_head_dim=8),
    "glm4_moe": Glm4MoeConfig(**TEXT, expert_hidden=8, kv_heads=1),
    "gpt2": GPT2Config(**TEXT),
    "gpt_oss": GptOssConfig(**TEXT, kv_heads=1, experts=4),
    "gpt_neox": GPTNeoXConfig(**TEXT, rotary_dim=4),
    "gptj": GPTJConfig(**TEXT, rotary_dim=4),
    "llama": LlamaConfig(**TEXT, kv_heads=1, head_size=8),
    "mamba2": Mamba2Config(vocab=11, width=16, layers=2, heads=2, head_size=16),
    "mixtral": MixtralConfig(**TEXT, kv_heads=1),
    "modernbert": ModernBertConfig(**TEXT, pad=0),
    "opt": OPTConfig(**TEXT),
    "phi3": Phi3Config(**TEXT, kv_heads=1),
    "qwen3_5": Qwen3_5Config(**TEXT, kv_heads=1, key_heads=2, value_heads=2),
    "t5": T5Config(**TEXT, decoder_layers=2),
    "vit": ViTConfig(**SIZES, image=(4, 4), patch=(2, 2)),
    "whisper": WhisperConfig(**TEXT, decoder_layers=2, decoder_start=1, bos=0, pad=1),
}
IMAGE, LABELS = ClipImageConfig(**SIZES, image=8, patch=4), ClipTextConfig(**TEXT, eos=(10,))
OTHER_IMAGE = SiglipImageConfig(**SIZES, image=8, patch=4)
VIT = ViTConfig(**SIZES, image=(4, 4), patch=(2, 2))
WRITER = GPT2Config(**TEXT, cross_attention=True)
# Of several parts, whose settings are not read from one level of a file.
OF_PARTS = {
    "clip": ClipConfig(IMAGE, LABELS, outputs=12),
    "siglip": SiglipConfig(OTHER_IMAGE, SiglipTextConfig(**TEXT)),
    "siglip_text": SiglipTextConfig(**TEXT),
    "captioner": CaptionerConfig(VIT, WRITER),
}


def numbers_of(family):
    """Each setting of a `config.json` that a field of the configuration is read from, if it is a
    number: (setting, value)."""
    names = names_of(hf_names(CONFIGS[family])._FIELDS)
    settings = write_config(CONFIGS[family])
    actual = [(name, settings.get(name)) for name in names.values()]
    return [(name, value) for name, value in actual if type(value) in (int, float)]


def read(family, **changes):
    config = CONFIGS[family]
    return read_config(type(config), {**write_config(config), **changes})


@pytest.mark.parametrize("family", few_of(CONFIGS, "llama", "whisper"))
def test_no_number_of_a_file_is_nan_infinite_or_a_boolean(family):
    read(family)
    numbers = numbers_of(family)
    assert len(numbers) >= 6
    for name, _ in numbers:
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(ValueError, match=f"`{name}` is -?(nan|inf), and must be a finite"):
                read(family, **{name: value})
        for value in (True, False, "1"):
            with pytest.raises((TypeError, ValueError)):
                read(family, **{name: value})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("value", [0, -1])
def test_no_size_of_a_file_is_zero_or_negative(family, value):
    """A count of heads of 0 is not the absence of one, either."""
    ids = ("token_id", "dropout", "pdrop", "drop_path", "eps", "router_aux_loss_coef")
    ids += ("num_kv_shared_layers",)  # of which there may be none
    sizes = [name for name, _ in numbers_of(family) if not any(part in name for part in ids)]
    for name in sizes:
        with pytest.raises(ValueError, match="at least|positive|multiple|even|must be|implemented"):
            read(family, **{name: value})


BAD = [
    ("llama", "norm_eps", math.nan, "`norm_eps` must be a finite number, but is nan"),
    ("llama", "norm_eps", -1e-5, "`norm_eps` must not be negative"),
    ("llama", "attention_dropout", 1.0, "`attention_dropout` must be at least 0 and less than 1"),
    ("bert", "head_dropout", -0.1, "`head_dropout` must be at least 0 and less than 1"),
    ("bert", "norm_eps", math.inf, "`norm_eps` must be a finite number, but is inf"),
    ("gemma", "rope_base", 0, "`rope_base` must be positive, but is 0"),
    ("gemma", "logit_cap", -30.0, "`logit_cap` must be positive"),
    ("gemma", "score_scale", math.nan, "`score_scale` must be a finite number"),
    ("llama", "window", 0, "`window` must be positive"),
    ("llama", "head_size", 0, "`head_size` must be positive"),
    ("llama", "rope_layers", (True, False, True), "has 3 entries, but there are 2 layers"),
    ("phi3", "rotary_dim", 3, "`rotary_dim` must be even, positive and at most the head size"),
    ("phi3", "rope_scaling", LongRope((1.0,), (2.0,), 8), "has 1 factors in `short`, but there"),
    ("modernbert", "window", 0, "`window` must be positive"),
    ("modernbert", "local", (True,), "one entry for each of the 2 layers, but has 1"),
    ("dinov2", "patch", 3, "`image` must be a multiple of `patch`, but 4 is not a multiple of 3"),
    ("dinov2", "registers", -1, "`registers` must not be negative"),
    ("dinov3", "patch", 3, "`image` must be a multiple of `patch`, but 4 is not a multiple of 3"),
    ("dinov3", "heads", 8, "head size must be a multiple of 4, a half of it for rows"),
    ("dinov3", "shift", -0.1, "`shift` must not be negative"),
    ("dinov3", "jitter", 0.5, "`jitter` must be at least 1"),
    ("mixtral", "experts", 0, "`experts` must be positive"),
    ("mixtral", "router_loss_weight", -0.1, "`router_loss_weight` must not be negative"),
    ("gpt2", "residual_dropout", math.nan, "`residual_dropout` must be"),
    ("vit", "image", (0, 0), "`image` must be a multiple of `patch`"),
    ("clip", "outputs", 0, "`outputs` must be positive, but is 0 in the `ClipConfig`"),
    ("siglip_text", "outputs", 0, "`outputs` must be positive"),
    ("captioner", "decoder_start", 11, "`decoder_start` is 11, but the token ids .* are 0 to 10"),
    ("bart", "decoder_start", -1, "`decoder_start` is -1, but .* 0 to 10 in the `BartConfig`"),
    ("t5", "decoder_start", 11, "`decoder_start` is 11"),
]


@pytest.mark.parametrize(("family", "field", "value", "says"), BAD)
def test_a_value_out_of_its_range_is_refused(family, field, value, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace((CONFIGS | OF_PARTS)[family], **{field: value})


@pytest.mark.parametrize(
    ("family", "field", "value", "says"),
    [
        ("clip", "outputs", "12", "`outputs` must be an integer, but is '12'"),
        ("clip", "image", OTHER_IMAGE, "`image` must be a ClipImageConfig"),
        ("siglip", "text", LABELS, "`text` must be a SiglipTextConfig"),
        ("captioner", "encoder", None, "`encoder` must be a ViTConfig"),
        ("llama", "remat", ["dots"], r"`remat` must be .* but is \['dots'\]"),
    ],
)
def test_a_part_of_another_type_is_refused(family, field, value, says):
    config = copy.copy((CONFIGS | OF_PARTS)[family])
    object.__setattr__(config, field, value)  # without the tests' own checks of types
    with pytest.raises((TypeError, ValueError), match=says):
        config.__post_init__()


@dataclasses.dataclass(frozen=True)
class Fields:
    """Of all the kinds that configurations have, and not checked by anything but `check_fields`."""

    size: int = 1
    rate: int | float = 0.5
    window: int | None = None
    tied: bool = True
    scale_head: bool | None = None
    activation: str = "relu"
    kind: Literal["a", "b"] | None = "a"
    eos: tuple[int, ...] = ()
    patch: tuple[int, int] = (1, 1)
    scaling: RopeScaling | None = None


def test_values_of_the_declared_kinds_are_taken():
    check_fields(Fields())
    scaling = RopeScaling("linear", 2)
    check_fields(Fields(0, 0, 1, False, True, "gelu", None, (1, 2), (2, 3), scaling))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("size", True, "`size` must be an integer, but is True"),
        ("size", 8.0, "`size` must be an integer, but is 8.0"),
        ("size", None, "`size` must be an integer, but is None"),
        ("rate", False, "`rate` must be a number, but is False"),
        ("rate", 1j, "`rate` must be a number"),
        ("window", True, "`window` must be an integer or None, but is True"),
        ("tied", 1, "`tied` must be True or False, but is 1"),
        ("scale_head", 0, "`scale_head` must be True or False or None"),
        ("activation", 3, "`activation` must be text"),
        ("kind", 1, "`kind` must be 'a' or 'b' or None"),
        ("kind", "c", "`kind` must be 'a' or 'b' or None, but is 'c'"),
        ("eos", [1], "`eos` must be a tuple in which each is an integer"),
        ("eos", (True,), "`eos` must be a tuple in which each is an integer"),
        ("patch", (2,), "`patch` must be a tuple in which each is an integer"),
        ("scaling", {}, "`scaling` must be a RopeScaling or None"),
    ],
)
def test_values_of_another_kind_are_refused(field, value, says):
    with pytest.raises(ValueError if isinstance(value, str) else TypeError, match=says):
        check_fields(dataclasses.replace(Fields(), **{field: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 0.0},
        {"factor": math.nan},
        {"low": 4.0, "high": 4.0},
        {"original": 0},
    ],
    ids=str,
)
def test_scaled_wavelengths_are_finite(changes):
    with pytest.raises(ValueError, match=f"`{next(iter(changes))}` must be"):
        dataclasses.replace(RopeScaling("llama3", 8.0), **changes)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1e-5", "true", "1e999"])
def test_such_a_file_is_not_loaded(value, tmp_path):
    """JSON of Python's kind has NaN and infinities, and numbers that are too large to be finite."""
    model = Llama(CONFIGS["llama"], key=jax.random.key(0))
    rc.save_pretrained(model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    settings = json.loads(file.read_text())
    text = json.dumps(settings | {"rms_norm_eps": "here"})
    file.write_text(text.replace('"here"', value))
    with pytest.raises(ValueError, match=r"model cannot be loaded.*(rms_norm_eps|norm_eps)"):
        rc.load_pretrained(tmp_path / "model")
