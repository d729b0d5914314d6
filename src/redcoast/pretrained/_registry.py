"""The model families: their classes, `model_type`s, and modules in `hf`."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import equinox as eqx

from .. import models
from ..core._errors import short_repr
from ._quantised import split_quantisation
from ._settings import Settings
from ._text_part import text_settings
from .hf import (
    bart,
    bert,
    captioner,
    clip,
    deepseek_v3,
    dinov2,
    dinov3,
    gemma,
    gemma4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    llama,
    mamba2,
    mixtral,
    modernbert,
    opt,
    phi3,
    qwen3_5,
    siglip,
    t5,
    vit,
    whisper,
)


@dataclass(frozen=True)
class Family:
    """A model family of `redcoast.models`, and the names of its settings and tensors in Hugging
    Face's format.

    - `model`, `config`: the classes of the model and of its configuration.
    - `hf`: a module with `read(settings)`, which returns the fields of the configuration;
      `write(config)`, which returns the settings; and `tensors(config)`, which maps each array to
      its published tensors.

    The module may also have the constants `BASE_PREFIX`, `BUFFERS` and `ZEROS`, and the functions

    - `duplicates(config)`: maps other names under which a file may contain a tensor to the
      tensor's own name; by default, the head is such a name if it is tied.
    - `settle(config, names)`: completes a configuration from the names of the tensors in files.
    - `computed(config)`: the shapes of tensors that are computed when a model is created.
    - `unused(config)`: patterns of tensors that files have and the model has not.
    - `example_inputs(config, rows)`: abstract inputs for planning.
    - `module_name(name)`: the name that a tensor of the files has in a model of `transformers` 5.
    - `split_modules(config)`: the tensors of such a model, for arrays whose tensor in the files is
      of several modules.
    """

    model: type[eqx.Module]
    config: type
    hf: ModuleType
    types: tuple[str, ...]  # the values of `model_type` in a `config.json`


# The values of `model_type` are Hugging Face's. Each belongs to one family.
FAMILIES = (
    Family(models.Bart, models.BartConfig, bart, ("bart",)),
    Family(models.Bert, models.BertConfig, bert, bert.KINDS),
    Family(models.Captioner, models.CaptionerConfig, captioner, ("vision-encoder-decoder",)),
    Family(models.Clip, models.ClipConfig, clip, ("clip",)),
    Family(models.DeepseekV3, models.DeepseekV3Config, deepseek_v3, deepseek_v3.KINDS),
    Family(models.Dinov2, models.Dinov2Config, dinov2, ("dinov2", "dinov2_with_registers")),
    Family(models.Dinov3, models.Dinov3Config, dinov3, ("dinov3_vit",)),
    Family(models.Gemma, models.GemmaConfig, gemma, ("gemma", "gemma2", "gemma3_text")),
    Family(models.Gemma4, models.Gemma4Config, gemma4, ("gemma4_text",)),
    Family(models.Glm4Moe, models.Glm4MoeConfig, glm4_moe, ("glm4_moe",)),
    Family(models.GPT2, models.GPT2Config, gpt2, ("gpt2",)),
    Family(models.GPTNeoX, models.GPTNeoXConfig, gpt_neox, ("gpt_neox",)),
    Family(models.GptOss, models.GptOssConfig, gpt_oss, ("gpt_oss",)),
    Family(models.GPTJ, models.GPTJConfig, gptj, ("gptj",)),
    Family(models.Llama, models.LlamaConfig, llama, tuple(llama.KINDS)),
    Family(models.Mamba2, models.Mamba2Config, mamba2, ("mamba2",)),
    Family(models.Mixtral, models.MixtralConfig, mixtral, tuple(mixtral.KINDS)),
    Family(models.ModernBert, models.ModernBertConfig, modernbert, ("modernbert",)),
    Family(models.OPT, models.OPTConfig, opt, ("opt",)),
    Family(models.Phi3, models.Phi3Config, phi3, ("phi3",)),
    Family(models.Qwen3_5, models.Qwen3_5Config, qwen3_5, qwen3_5.KINDS),
    Family(models.Siglip, models.SiglipConfig, siglip, ("siglip",)),
    Family(models.T5, models.T5Config, t5, ("mt5", "t5")),
    Family(models.ViT, models.ViTConfig, vit, ("vit",)),
    Family(models.Whisper, models.WhisperConfig, whisper, ("whisper",)),
)
# By the `model_type` of a file, and by the class of a model or of its configuration.
_BY_TYPE: dict[str, Family] = {}
_BY_CLASS: dict[type, Family] = {}
for _family in FAMILIES:
    _BY_TYPE |= dict.fromkeys(_family.types, _family)
    _BY_CLASS |= dict.fromkeys((_family.model, _family.config), _family)


def family_of(model_or_config: object) -> Family | None:
    """Returns the family of a model or of a configuration, or None for any other value."""
    return _BY_CLASS.get(type(model_or_config))


def hf_names(config: object) -> ModuleType:
    """Returns the module in `hf` for a configuration of `redcoast.models`."""
    return _BY_CLASS[type(config)].hf


def read_config(config_class: type, settings: Settings) -> Any:
    """Creates a configuration of a given class from a parsed `config.json`.

    Raises `ValueError` that names every unknown setting that might change the results.
    """
    return config_class(**_BY_CLASS[config_class].hf.read(settings))


def write_config(config: object) -> Settings:
    return hf_names(config).write(config)


def find_family(settings: Settings, where: object) -> tuple[Family, Any]:
    """Returns the family of the model that the settings describe, and its configuration."""
    settings = text_settings(settings)
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in _BY_TYPE:
        raise ValueError(
            f"{where} holds a model of type {short_repr(kind)}, which is not supported. Supported "
            f"types: {', '.join(sorted(_BY_TYPE))}."
        )
    settings, _ = split_quantisation(settings, where)
    family = _BY_TYPE[kind]
    try:
        return family, read_config(family.config, settings)
    except ValueError as error:
        raise ValueError(f"{where} cannot be loaded. {error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"{where} cannot be loaded: its settings have values that are not valid for the type "
            f"{kind} ({type(error).__name__}: {error})."
        ) from error
