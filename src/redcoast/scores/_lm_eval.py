"""A model in memory as a model of EleutherAI's `lm-eval`."""

from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from ..core._errors import check_integer
from ..core._frames import hide_frames


@hide_frames
def lm_eval_model(
    model: PyTree,
    tokenizer: Any,
    *,
    chat_template: Callable[..., str] | None = None,
    batch_size: int = 8,
    context: int | None = None,
    max_new_tokens: int = 256,
) -> Any:
    """Wraps a decoder for EleutherAI's `lm-eval`, which then scores it in this process, sharded as
    it is, without a server and without other weights.

    Needs the package `lm-eval`, 0.4.9 or newer.

    **Arguments:**

    - `model`: a decoder of `redcoast.models`, on one device or sharded.
    - `tokenizer`: a tokenizer of `tokenizers`, from [`redcoast.load_tokenizer`][].
    - `chat_template`: from [`redcoast.load_chat_template`][], for `apply_chat_template=True`.
    - `batch_size`: the number of texts in a batch, a multiple of data x fsdp of the mesh.
    - `context`: the maximum number of tokens in a text, by default `model.config.context` or
        `model.config.positions`. Longer ones lose their beginning.
    - `max_new_tokens`: the maximum length of an answer, for tasks without a length of their own.

    **Returns:**

    An `lm_eval.api.model.LM`, to pass to `lm_eval.simple_evaluate`. Texts are padded to a few
    lengths, each of which is compiled once.

    **Raises:**

    `ModuleNotFoundError` without `lm-eval`; `ValueError` if a number is less than 1, or if the
    model has no token that ends a text, or no length.

    !!! Example

        ```py
        import lm_eval

        model = rc.load_pretrained("smollm2", mesh=mesh)
        wrapped = rc.lm_eval_model(model, rc.load_tokenizer("smollm2"), batch_size=16)
        results = lm_eval.simple_evaluate(wrapped, tasks=["gsm8k"])
        ```
    """
    for name, value in {"batch_size": batch_size, "max_new_tokens": max_new_tokens}.items():
        check_integer(name, value)
    config = model.config
    length = context or getattr(config, "context", None) or getattr(config, "positions", None)
    if not length:
        raise ValueError("The configuration of the model has no length. Pass `context`, in tokens.")
    check_integer("context", length)
    if not config.eos:
        raise ValueError(
            "The configuration of the model has no `eos`, so its answers never end. Set the token "
            "that ends a text: `dataclasses.replace(config, eos=(token,))`."
        )
    try:
        from ._in_memory import InMemory
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`lm_eval_model` needs the package {error.name}, which is not installed: "
            '`pip install "lm-eval>=0.4.9"`.'
        ) from error
    return InMemory(model, tokenizer, chat_template, batch_size, length, max_new_tokens)
