"""Functions that create models of published sizes.

`llama_7b(key=key)` creates a randomly initialised model. Other keyword arguments override fields
of its configuration, as in `llama_7b(key=key, remat="full")`. A model that is too large for this
machine can be created abstractly, for planning: `eqx.filter_eval_shape(llama_7b, key=key)`.
"""

import dataclasses
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import PRNGKeyArray

from ._rotary import RopeScaling, Yarn
from .bart import Bart
from .bert import Bert
from .clip import Clip, ClipImageConfig, ClipTextConfig
from .deepseek_v3 import DeepseekV3
from .dinov2 import Dinov2
from .dinov3 import Dinov3
from .gemma import Gemma
from .glm4_moe import Glm4Moe
from .gpt2 import GPT2
from .gpt_neox import GPTNeoX
from .gpt_oss import GptOss
from .gptj import GPTJ
from .llama import Llama
from .mamba2 import Mamba2
from .mixtral import Mixtral
from .modernbert import ModernBert
from .opt import OPT
from .phi3 import Phi3
from .qwen3_5 import Qwen3_5
from .siglip import Siglip, SiglipImageConfig, SiglipTextConfig
from .t5 import T5
from .vit import ViT
from .whisper import Whisper

_Model = TypeVar("_Model", covariant=True)


@runtime_checkable
class _Named(Protocol[_Model]):
    """Creates a randomly initialised model of a published size."""

    def __call__(self, *, key: PRNGKeyArray, **changes: Any) -> _Model: ...


def _named(model: type[_Model], *sizes: Any, **more: Any) -> _Named[_Model]:
    make: Any = model
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(make)}
    config = kinds["config"](*sizes, **more)
    return lambda *, key, **changes: make(dataclasses.replace(config, **changes), key=key)


_CLIP: dict[str, Any] = {"bos": 49406, "eos": (49407,), "pad": 49407}
_SIGLIP: dict[str, Any] = {"bos": 49406, "eos": (49407,), "pad": 1}
_LLAMA1: dict[str, Any] = {"norm_eps": 1e-6, "bos": 1, "eos": (2,)}
_LLAMA3: dict[str, Any] = {"rope_base": 5e5, "context": 8192, "bos": 128000, "eos": (128001,)}
_GLM4: dict[str, Any] = {"kv_heads": 8, "head_size": 128, "rotary_dim": 64, "rope_base": 1e6}
_GLM4 |= {"qkv_bias": True, "eos": (151329, 151336, 151338), "pad": 151329}
_QWEN3_5: dict[str, Any] = {"head_size": 256, "rotary_dim": 64, "eos": (248044,)}
_GPT2: dict[str, Any] = {"bos": 50256, "eos": (50256,)}
_PYTHIA: dict[str, Any] = {"bos": 0, "eos": (0,)}
_OPT: dict[str, Any] = {"pad": 1, "bos": 2, "eos": (2,)}
_OSS: dict[str, Any] = {"head_size": 64, "window": 128, "router_loss_weight": 0.9}
_OSS |= {"rope_scaling": Yarn(32.0, 4096, rounded=False, amplitude=1.3465735902799727)}
_OSS |= {"eos": (200002,), "pad": 199999}
_T5: dict[str, Any] = {"head_size": 64, "pad": 0, "eos": (1,)}
_T5_GATED = _T5 | {"activation": "gelu_new", "gated": True, "tied": False}
_ROBERTA: dict[str, Any] = {"kind": "roberta", "types": 1, "norm_eps": 1e-5, "pooler": True}
_ROBERTA |= {"pad": 1, "bos": 0, "eos": (2,)}
_MODERNBERT: dict[str, Any] = {"pooling": "mean", "bos": 50281, "eos": (50282,), "pad": 50283}
_MAMBA2: dict[str, Any] = {"tied": True, "bos": 0, "eos": (0,), "pad": 0}
_WHISPER: dict[str, Any] = {"bos": 50257, "eos": (50257,), "pad": 50257}
_GEMMA: dict[str, Any] = {"pad": 0, "bos": 2, "eos": (1,)}
_GEMMA2 = _GEMMA | {"window": 4096, "post_norms": True, "score_cap": 50.0, "logit_cap": 30.0}
_GEMMA3 = _GEMMA | {"post_norms": True, "qk_norm": True, "score_scale": 256, "context": 131072}
_GEMMA3 |= {"rope_base": 1e6, "rope_scaling": RopeScaling("linear", 8.0), "local_rope_base": 1e4}

# fmt: off
llama_7b = _named(Llama, 32000, 4096, 32, 32, 32, 11008, **_LLAMA1)
llama_13b = _named(Llama, 32000, 5120, 40, 40, 40, 13824, **_LLAMA1)
llama_30b = _named(Llama, 32000, 6656, 60, 52, 52, 17920, **_LLAMA1)
llama_65b = _named(Llama, 32000, 8192, 80, 64, 64, 22016, **_LLAMA1)
llama2_70b = _named(
    Llama, 32000, 8192, 80, 64, 8, 28672,
    norm_eps=1e-5, context=4096, bos=1, eos=(2,),
)
llama3_8b = _named(Llama, 128256, 4096, 32, 32, 8, 14336, **_LLAMA3)
llama3_70b = _named(Llama, 128256, 8192, 80, 64, 8, 28672, **_LLAMA3)
llama3_2_1b = _named(
    Llama, 128256, 2048, 16, 32, 8, 8192,
    rope_scaling=RopeScaling("llama3", 32.0), tied=True, **_LLAMA3 | {"context": 131072},
)
smollm2_135m = _named(
    Llama, 49152, 576, 30, 9, 3, 1536,
    rope_base=1e5, tied=True, context=8192, bos=0, eos=(0,),
)
mistral_7b = _named(
    Llama, 32000, 4096, 32, 32, 8, 14336,
    window=4096, context=32768, bos=1, eos=(2,),
)
qwen2_7b = _named(
    Llama, 152064, 3584, 28, 28, 4, 18944,
    rope_base=1e6, norm_eps=1e-6, qkv_bias=True, context=131072, bos=151643, eos=(151643,),
)
qwen3_8b = _named(
    Llama, 151936, 4096, 36, 32, 8, 12288,
    head_size=128, rope_base=1e6, norm_eps=1e-6, qk_norm=True, context=40960, bos=151643,
    eos=(151645,),
)

smollm3_3b = _named(
    Llama, 128256, 2048, 36, 16, 4, 11008,
    rope_base=5e6, rope_layers=9 * (True, True, True, False), norm_eps=1e-6, tied=True,
    context=65536, bos=128000, eos=(128001,), pad=128004,
)
olmo2_7b = _named(
    Llama, 100352, 4096, 32, 32, 32, 11008,
    rope_base=5e5, norm_eps=1e-6, qk_norm=True, output_norms=True, context=4096, eos=(100257,),
    pad=100277,
)
olmo3_7b = _named(
    Llama, 100278, 4096, 32, 32, 32, 11008,
    rope_base=5e5, rope_scaling=Yarn(8.0, 8192, amplitude=1.2079441541679836),
    local=8 * (True, True, True, False), local_rope_base=5e5, window=4096, norm_eps=1e-6,
    qk_norm=True, output_norms=True, context=65536, eos=(100257,), pad=100277,
)

phi3_mini = _named(
    Phi3, 32064, 3072, 32, 32, 32, 8192,
    window=2047, context=4096, bos=1, eos=(32000,), pad=32000,
)
phi4 = _named(
    Phi3, 100352, 5120, 40, 40, 10, 17920,
    rope_base=250000, context=16384, bos=100257, eos=(100257,), pad=100257,
)
phi4_mini = _named(
    Phi3, 200064, 3072, 32, 24, 8, 8192,
    rotary_dim=96, tied=True, context=4096, bos=199999, eos=(199999,), pad=199999,
)

gpt2_small = _named(GPT2, 50257, 768, 12, 12, 3072, **_GPT2)
gpt2_medium = _named(GPT2, 50257, 1024, 24, 16, 4096, **_GPT2)
gpt2_large = _named(GPT2, 50257, 1280, 36, 20, 5120, **_GPT2)
gpt2_xl = _named(GPT2, 50257, 1600, 48, 25, 6400, **_GPT2)

gpt_oss_20b = _named(GptOss, 201088, 2880, 24, 64, 8, 2880, 32, local=12 * (True, False), **_OSS)
gpt_oss_120b = _named(GptOss, 201088, 2880, 36, 64, 8, 2880, 128, local=18 * (True, False), **_OSS)

gptj_6b = _named(GPTJ, 50400, 4096, 28, 16, 16384, **_GPT2)

pythia_70m = _named(GPTNeoX, 50304, 512, 6, 8, 2048, **_PYTHIA)
pythia_160m = _named(GPTNeoX, 50304, 768, 12, 12, 3072, **_PYTHIA)
pythia_410m = _named(GPTNeoX, 50304, 1024, 24, 16, 4096, **_PYTHIA)
pythia_1b = _named(GPTNeoX, 50304, 2048, 16, 8, 8192, **_PYTHIA | {"rotary_dim": 64})
pythia_1_4b = _named(GPTNeoX, 50304, 2048, 24, 16, 8192, **_PYTHIA | {"rotary_dim": 32})
pythia_2_8b = _named(GPTNeoX, 50304, 2560, 32, 32, 10240, **_PYTHIA | {"rotary_dim": 20})
pythia_6_9b = _named(GPTNeoX, 50432, 4096, 32, 32, 16384, **_PYTHIA | {"rotary_dim": 32})
pythia_12b = _named(GPTNeoX, 50688, 5120, 36, 40, 20480, **_PYTHIA | {"rotary_dim": 32})

opt_125m = _named(OPT, 50272, 768, 12, 12, 3072, **_OPT)
opt_350m = _named(
    OPT, 50272, 1024, 24, 16, 4096,
    embed_width=512, post_norm=True, final_norm=False, **_OPT,
)
opt_1_3b = _named(OPT, 50272, 2048, 24, 32, 8192, **_OPT)
opt_2_7b = _named(OPT, 50272, 2560, 32, 32, 10240, **_OPT)
opt_6_7b = _named(OPT, 50272, 4096, 32, 32, 16384, **_OPT)
opt_13b = _named(OPT, 50272, 5120, 40, 40, 20480, **_OPT)
opt_30b = _named(OPT, 50272, 7168, 48, 56, 28672, **_OPT)
opt_66b = _named(OPT, 50272, 9216, 64, 72, 36864, **_OPT)

gemma_2b = _named(Gemma, 256000, 2048, 18, 8, 1, 16384, **_GEMMA)
gemma_7b = _named(Gemma, 256000, 3072, 28, 16, 16, 24576, **_GEMMA)
gemma2_2b = _named(
    Gemma, 256000, 2304, 26, 8, 4, 9216,
    local=(True, False) * 13, score_scale=256, **_GEMMA2,
)
gemma2_9b = _named(
    Gemma, 256000, 3584, 42, 16, 8, 14336,
    local=(True, False) * 21, score_scale=256, **_GEMMA2,
)
gemma2_27b = _named(
    Gemma, 256000, 4608, 46, 32, 16, 36864,
    head_dim=128, local=(True, False) * 23, score_scale=144, **_GEMMA2,
)
gemma3_1b = _named(
    Gemma, 262144, 1152, 26, 4, 1, 6912,
    local=(*((True,) * 5 + (False,)) * 4, True, True), window=512, rope_base=1e6,
    local_rope_base=1e4, post_norms=True, qk_norm=True, score_scale=256, context=32768, **_GEMMA,
)
gemma3_4b = _named(
    Gemma, 262208, 2560, 34, 8, 4, 10240,
    local=(*((True,) * 5 + (False,)) * 5, True, True, True, True), window=1024, **_GEMMA3,
)
gemma3_12b = _named(
    Gemma, 262208, 3840, 48, 16, 8, 15360,
    local=((True,) * 5 + (False,)) * 8, window=1024, **_GEMMA3,
)
gemma3_27b = _named(
    Gemma, 262208, 5376, 62, 32, 16, 21504,
    head_dim=128, local=(*((True,) * 5 + (False,)) * 10, True, True), window=1024,
    **_GEMMA3 | {"score_scale": 168},
)

mixtral_8x7b = _named(Mixtral, 32000, 4096, 32, 32, 8, 14336, bos=1, eos=(2,))
mixtral_8x22b = _named(Mixtral, 32000, 6144, 56, 48, 8, 16384, context=65536, bos=1, eos=(2,))
qwen3_30b_a3b = _named(
    Mixtral, 151936, 2048, 48, 32, 4, 768, 128, 8,
    head_size=128, norm_eps=1e-6, qk_norm=True, context=40960, bos=151643, eos=(151645,),
)

mamba2_130m = _named(Mamba2, 50288, 768, 24, 24, **_MAMBA2)
mamba2_370m = _named(Mamba2, 50288, 1024, 48, 32, **_MAMBA2)
mamba2_780m = _named(Mamba2, 50288, 1536, 48, 48, **_MAMBA2)
mamba2_1_3b = _named(Mamba2, 50288, 2048, 48, 64, **_MAMBA2)
mamba2_2_7b = _named(Mamba2, 50288, 2560, 64, 80, **_MAMBA2)

deepseek_v3_671b = _named(
    DeepseekV3, 129280, 7168, 61, 128, 18432, 2048,
    rope_scaling=Yarn(40, 4096), score_scaling=1.0, context=163840, bos=0, eos=(1,),
)
kimi_k2 = _named(
    DeepseekV3, 163840, 7168, 61, 64, 18432, 2048,
    dense_layers=1, experts=384, groups=1, chosen_groups=1, route_scale=2.827, rope_base=5e4,
    rope_scaling=Yarn(32, 4096, fast=1, slow=1), score_scaling=1.0, context=131072, bos=163584,
    eos=(163585,),
)

glm4_5 = _named(
    Glm4Moe, 151552, 5120, 92, 96, 12288, 1536,
    dense_layers=3, experts=160, route_scale=2.5, qk_norm=True, **_GLM4,
)
glm4_5_air = _named(Glm4Moe, 151552, 4096, 46, 96, 10944, 1408, **_GLM4)

qwen3_5_9b = _named(Qwen3_5, 248320, 4096, 32, 16, 4, 12288, **_QWEN3_5)
qwen3_5_35b_a3b = _named(Qwen3_5, 248320, 2048, 40, 16, 2, 512, experts=256, **_QWEN3_5)

t5_small = _named(T5, 32128, 512, 6, 6, 8, 2048, **_T5)
t5_base = _named(T5, 32128, 768, 12, 12, 12, 3072, **_T5)
t5_large = _named(T5, 32128, 1024, 24, 24, 16, 4096, **_T5)
t5_3b = _named(T5, 32128, 1024, 24, 24, 32, 16384, head_size=128, pad=0, eos=(1,))
t5_11b = _named(T5, 32128, 1024, 24, 24, 128, 65536, head_size=128, pad=0, eos=(1,))
t5_v1_1_small = _named(T5, 32128, 512, 8, 8, 6, 1024, **_T5_GATED)
t5_v1_1_base = _named(T5, 32128, 768, 12, 12, 12, 2048, **_T5_GATED)
t5_v1_1_large = _named(T5, 32128, 1024, 24, 24, 16, 2816, **_T5_GATED)
t5_xl = _named(T5, 32128, 2048, 24, 24, 32, 5120, **_T5_GATED)
t5_xxl = _named(T5, 32128, 4096, 24, 24, 64, 10240, **_T5_GATED)
mt5_small = _named(T5, 250112, 512, 8, 8, 6, 1024, kind="mt5", **_T5_GATED)
mt5_base = _named(T5, 250112, 768, 12, 12, 12, 2048, kind="mt5", **_T5_GATED)
mt5_large = _named(T5, 250112, 1024, 24, 24, 16, 2816, kind="mt5", **_T5_GATED)

bart_base = _named(Bart, 50265, 768, 6, 6, 12, 3072, pad=1, bos=0, eos=(2,))
bart_large = _named(Bart, 50265, 1024, 12, 12, 16, 4096, pad=1, bos=0, eos=(2,))

bert_base = _named(Bert, 30522, 768, 12, 12, 3072, pooler=True, pad=0)
bert_large = _named(Bert, 30522, 1024, 24, 16, 4096, pooler=True, pad=0)
roberta_base = _named(Bert, 50265, 768, 12, 12, 3072, **_ROBERTA)
roberta_large = _named(Bert, 50265, 1024, 24, 16, 4096, **_ROBERTA)

modernbert_base = _named(ModernBert, 50368, 768, 22, 12, 1152, **_MODERNBERT)
modernbert_large = _named(ModernBert, 50368, 1024, 28, 16, 2624, **_MODERNBERT)

vit_base = _named(ViT, 768, 12, 12, 3072)
vit_large = _named(ViT, 1024, 24, 16, 4096)
vit_huge = _named(ViT, 1280, 32, 16, 5120, patch=(14, 14))

whisper_tiny = _named(Whisper, 51865, 384, 4, 4, 6, 1536, **_WHISPER)
whisper_base = _named(Whisper, 51865, 512, 6, 6, 8, 2048, **_WHISPER)
whisper_small = _named(Whisper, 51865, 768, 12, 12, 12, 3072, **_WHISPER)
whisper_medium = _named(Whisper, 51865, 1024, 24, 24, 16, 4096, **_WHISPER)
whisper_large_v3 = _named(
    Whisper, 51866, 1280, 32, 32, 20, 5120,
    mels=128, **_WHISPER | {"pad": 50256},
)
whisper_large_v3_turbo = _named(Whisper, 51866, 1280, 32, 4, 20, 5120, mels=128, **_WHISPER)
dinov2_small = _named(Dinov2, 384, 12, 6)
dinov2_base = _named(Dinov2, 768, 12, 12)
dinov2_large = _named(Dinov2, 1024, 24, 16)
dinov2_giant = _named(Dinov2, 1536, 40, 24, gated=True)
dinov3_small = _named(Dinov3, 384, 12, 6, 1536)
dinov3_small_plus = _named(Dinov3, 384, 12, 6, 1536, gated=True, activation="silu")
dinov3_base = _named(Dinov3, 768, 12, 12, 3072)
dinov3_large = _named(Dinov3, 1024, 24, 16, 4096)
dinov3_huge_plus = _named(Dinov3, 1280, 32, 20, 5120, gated=True, activation="silu")
dinov3_7b = _named(
    Dinov3, 4096, 40, 32, 8192,
    gated=True, activation="silu", q_bias=False, v_bias=False,
)

clip_base_32 = _named(
    Clip, ClipImageConfig(768, 12, 12, 3072),
    ClipTextConfig(49408, 512, 12, 8, 2048, **_CLIP),
)
clip_base_16 = _named(
    Clip, ClipImageConfig(768, 12, 12, 3072, patch=16),
    ClipTextConfig(49408, 512, 12, 8, 2048, **_CLIP),
)
clip_large_14 = _named(
    Clip, ClipImageConfig(1024, 24, 16, 4096, patch=14),
    ClipTextConfig(49408, 768, 12, 12, 3072, **_CLIP), 768,
)

siglip_base = _named(
    Siglip, SiglipImageConfig(768, 12, 12, 3072),
    SiglipTextConfig(32000, 768, 12, 12, 3072, **_SIGLIP),
)
siglip_large = _named(
    Siglip, SiglipImageConfig(1024, 24, 16, 4096, image=256),
    SiglipTextConfig(32000, 1024, 24, 16, 4096, **_SIGLIP),
)
siglip_so400m = _named(
    Siglip, SiglipImageConfig(1152, 27, 16, 4304, image=384, patch=14),
    SiglipTextConfig(32000, 1152, 27, 16, 4304, **_SIGLIP),
)
# fmt: on

# For `import *`: the sizes, which are the functions of this module.
_public = [name for name, value in vars().items() if getattr(value, "__module__", "") == __name__]
__all__ = [name for name in _public if not name.startswith("_")]  # pyright: ignore
