"""Which model a `config.json` is of."""

from typing import Any

_FAMILIES = {
    "bart": "Bart",
    "bert": "Bert",
    "gemma": "Gemma",
    "gemma2": "Gemma",
    "gemma3_text": "Gemma",
    "gpt2": "GPT2",
    "gptj": "GPTJ",
    "llama": "Llama",
    "mistral": "Llama",
    "mixtral": "Mixtral",
    "mt5": "T5",
    "opt": "OPT",
    "qwen2": "Llama",
    "qwen3": "Llama",
    "roberta": "Bert",
    "t5": "T5",
    "vision-encoder-decoder": "Captioner",
    "vit": "ViT",
}


def find_family(settings: dict[str, Any], where: Any) -> tuple[Any, Any]:
    """The class of the model that the settings are of, and its configuration."""
    from .. import models

    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(
            f"{where} holds a model of the type {kind!r}, and there are models of the types "
            f"{', '.join(sorted(_FAMILIES))}."
        )
    name = _FAMILIES[kind]
    try:
        config = getattr(models, f"{name}Config").from_hugging_face(settings)
    except ValueError as error:
        raise ValueError(f"{where} cannot be loaded. {error}") from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"{where} cannot be loaded: its settings have values of another kind than those of a "
            f"{kind} ({type(error).__name__}: {error})."
        ) from error
    return getattr(models, name), config
