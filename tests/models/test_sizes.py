"""The named sizes have as many parameters as the published models."""

import equinox as eqx
import jax
import pytest
from grids import few_of

from redcoast.models import sizes

# Counted in the published models (by `transformers`), tied arrays once.
PUBLISHED = {
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_30b": 32_528_943_616,
    "llama_65b": 65_285_660_672,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_2_1b": 1_235_814_400,
    "smollm2_135m": 134_515_008,
    "mistral_7b": 7_241_732_096,
    "qwen2_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "smollm3_3b": 3_075_098_624,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "phi3_mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "phi4_mini": 3_836_021_760,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "pythia_70m": 70_426_624,
    "pythia_160m": 162_322_944,
    "pythia_410m": 405_334_016,
    "pythia_1b": 1_011_781_632,
    "pythia_1_4b": 1_414_647_808,
    "pythia_2_8b": 2_775_208_960,
    "pythia_6_9b": 6_857_302_016,
    "pythia_12b": 11_846_072_320,
    "gptj_6b": 6_050_882_784,
    "opt_125m": 125_239_296,
    "opt_350m": 331_196_416,
    "opt_1_3b": 1_315_758_080,
    "opt_2_7b": 2_651_596_800,
    "opt_6_7b": 6_658_473_984,
    "opt_13b": 12_853_473_280,
    "opt_30b": 29_974_540_288,
    "opt_66b": 65_719_701_504,
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_v3_671b": 671_026_404_352,
    "kimi_k2": 1_026_408_209_408,
    "glm4_5": 352_797_814_784,
    "glm4_5_air": 106_852_245_504,
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "mamba2_130m": 128_989_632,
    "mamba2_370m": 368_346_624,
    "mamba2_780m": 780_161_280,
    "mamba2_1_3b": 1_343_757_312,
    "mamba2_2_7b": 2_702_599_680,
    "t5_small": 60_506_624,
    "t5_base": 222_903_552,
    "t5_large": 737_668_096,
    "t5_3b": 2_851_598_336,
    "t5_11b": 11_307_321_344,
    "t5_v1_1_small": 76_961_152,
    "t5_v1_1_base": 247_577_856,
    "t5_v1_1_large": 783_150_080,
    "t5_xl": 2_849_757_184,
    "t5_xxl": 11_135_332_352,
    "mt5_small": 300_176_768,
    "mt5_base": 582_401_280,
    "mt5_large": 1_229_581_312,
    "bart_base": 139_420_416,
    "bart_large": 406_291_456,
    "bert_base": 109_482_240,
    "bert_large": 335_141_888,
    "roberta_base": 124_645_632,
    "roberta_large": 355_359_744,
    "modernbert_base": 149_014_272,
    "modernbert_large": 394_781_696,
    "vit_base": 85_798_656,
    "vit_large": 303_301_632,
    "vit_huge": 630_764_800,
    "whisper_tiny": 37_760_640,
    "whisper_base": 72_593_920,
    "whisper_small": 241_734_912,
    "whisper_medium": 763_857_920,
    "whisper_large_v3": 1_543_490_560,
    "whisper_large_v3_turbo": 808_878_080,
    "dinov2_small": 22_056_576,
    "dinov2_base": 86_580_480,
    "dinov2_large": 304_368_640,
    "dinov2_giant": 1_136_480_768,
    "dinov3_small": 21_596_544,
    "dinov3_small_plus": 28_692_864,
    "dinov3_base": 85_660_416,
    "dinov3_large": 303_129_600,
    "dinov3_huge_plus": 840_592_640,
    "dinov3_7b": 6_716_035_072,
    "siglip_base": 203_155_970,
    "clip_base_32": 151_277_313,
    "clip_base_16": 149_620_737,
    "clip_large_14": 427_616_513,
    "siglip_large": 652_150_786,
    "siglip_so400m": 877_960_498,
}
# One of each family, and of each kind within it.
FEW = (
    "llama3_8b",
    "gpt2_small",
    "gemma2_2b",
    "mixtral_8x7b",
    "mamba2_130m",
    "t5_small",
    "bert_base",
    "vit_base",
    "whisper_large_v3_turbo",
    "siglip_so400m",
)
NAMES = [name for name, value in vars(sizes).items() if name[0].islower() and callable(value)]


def test_every_named_size_is_counted():
    assert {*NAMES} - {"replace", "runtime_checkable"} == {*PUBLISHED}


@pytest.mark.parametrize("name", few_of(PUBLISHED, *FEW))
def test_parameters_are_those_published(name):
    model = eqx.filter_eval_shape(getattr(sizes, name), key=jax.random.key(0))
    # What BART adds to its logits, and routers to their scores of experts, is stored with the
    # parameters, but is none.
    extra = (
        getattr(model, "logits_bias", None),
        getattr(getattr(model, "layers", None), "correction", None),
    )
    sizes_of = [x.size for x in jax.tree.leaves(model) if not any(x is other for other in extra)]
    assert sum(sizes_of) == PUBLISHED[name]


@pytest.mark.thorough
def test_changes_take_the_place_of_published_values():
    small = sizes.llama_7b(key=jax.random.key(0), layers=1, width=64, heads=2, kv_heads=2, hidden=8)
    assert small.layers.gate.shape == (1, 64, 8)
    assert small.config.norm_eps == 1e-6


def test_unknown_changes_are_refused():
    with pytest.raises(TypeError, match="depth"):
        sizes.llama_7b(key=jax.random.key(0), depth=3)
