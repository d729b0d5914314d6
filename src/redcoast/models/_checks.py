"""Checks that the configurations share."""

from typing import Any

from ._layers import check_remat


def check_config(config: Any, *sizes: str) -> None:
    """Refuses sizes below 1, key heads that do not divide the heads, and unknown remat."""
    for name in sizes:
        if not isinstance(getattr(config, name), int):
            raise TypeError(f"`{name}` must be an integer, but is {getattr(config, name)!r}.")
        if getattr(config, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {getattr(config, name)}.")
    kv_heads = getattr(config, "kv_heads", config.heads)
    if config.heads % kv_heads:
        raise ValueError(
            f"`heads` must be a multiple of `kv_heads`, but {config.heads} is no multiple of "
            f"{kv_heads}."
        )
    check_remat(config.remat)


def check_heads(config: Any, *, even: bool = False) -> None:
    """Refuses a width that the heads do not divide, unless the size of a head is given; and
    sizes that rotary embeddings, which turn pairs of features, cannot turn."""
    if getattr(config, "head_size", None) is None and config.width % config.heads:
        raise ValueError(
            f"`width` must be a multiple of `heads`, but {config.width} is no multiple of "
            f"{config.heads}."
        )
    if even and config.head_dim % 2:
        raise ValueError(f"The size of a head must be even, but is {config.head_dim}.")


def check_rates(config: Any, *rates: str) -> None:
    """Refuses rates of dropout that are no probabilities below 1."""
    for name in rates:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(
                f"`{name}` must be at least 0 and less than 1, but is {getattr(config, name)}."
            )


def check_length(config: Any, length: int) -> None:
    """Refuses more tokens in a row than a model with learned positions has of these."""
    if length > config.positions:
        raise ValueError(
            f"There are {length} tokens in a row, but the model has {config.positions} positions. "
            "Cut the rows to that length."
        )
