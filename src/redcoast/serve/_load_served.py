"""The model, the tokenizer and the limits of a server, from the files of a model."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._decoding import Decoding, as_tuple
from ..generate._check_arguments import check_token_options
from ..generate._request import decoding_of
from ..pretrained import load_pretrained
from ..pretrained.text import load_chat_template, load_tokenizer
from ..pretrained.text._tokenizer_files import naming_file
from ._batching import Queue, Served, shared_request
from ._grammar import grammars_of
from ._openai_fields import Limits
from ._replies import Speller

# The maximum number of characters of a prompt for each token of the context. Vocabularies have runs
# of 128 spaces; the average token of a long text has fewer characters.
OF_SHORT, OF_LONG, SHORT = 128, 16, 2**18


@dataclass(frozen=True)
class Server:
    """The data that the routes need."""

    limits: Limits
    queue: Queue
    tokenizer: Any
    render: Callable[..., str] | None
    created: int
    speller: Speller

    def encode(self, text: str, *, special: bool) -> list[int]:
        # Encoding a single text would block all other Python threads.
        with naming_file(Path("The tokenizer"), "fails on this text"):
            (encoding,) = self.tokenizer.encode_batch([text], add_special_tokens=special)
            return encoding.ids


def load_served(
    weights: Path,
    *,
    mesh: Mesh,
    name: str | None = None,
    dtype: str = "float32",
    rows: int = 8,
    waiting: int = 64,
    context: int = 2048,
    new_tokens: int = 512,
    seed: int = 0,
) -> tuple[Served, Server]:
    """Loads a model, and determines the limits of requests.

    Raises `ValueError` if the files cannot be read, or if the model does not continue text.
    """
    over = None
    if mesh.size > 1:
        over = mesh
    model: PyTree = load_pretrained(weights, mesh=over, dtype=dtype)
    if not hasattr(model, "init_cache") or hasattr(model, "encode"):
        raise ValueError(f"A {type(model).__name__} does not continue text. Serve a decoder.")
    multiple = mesh.shape["data"] * mesh.shape["fsdp"]
    # The rows of a batch are split over data x fsdp.
    rows = multiple * max(1, rows // multiple)
    context = min(context, getattr(model.config, "positions", None) or context)
    tokenizer, render = load_tokenizer(weights), load_chat_template(weights)
    served = Served(model, tokenizer, rows, multiple, context, seed)
    eos = as_tuple(getattr(model.config, "eos", ()))
    # The decoding of the model's files, or else the default of the API: sampling at temperature 1.
    own = decoding_of(model.config) or Decoding()
    alone = {"beams": 1, "length_penalty": 1.0, "early_stopping": False, "num_return_sequences": 1}
    decoding = replace(own, temperature=own.temperature or 1.0, **alone)
    check_token_options(shared_request(model.config, decoding), model.config.vocab)
    limits = Limits(
        name=name or weights.resolve().name,
        vocab=model.config.vocab,
        context=context,
        rows=rows,
        new_tokens=new_tokens,
        decoding=decoding,
        characters=min(OF_SHORT * context, max(SHORT, OF_LONG * context)),
        eos=eos,
        grammars=grammars_of(tokenizer, model.config.vocab, eos),
    )
    queue = Queue(max(waiting, rows), rows, context)
    return served, Server(limits, queue, tokenizer, render, int(time.time()), Speller(tokenizer))
