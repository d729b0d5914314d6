"""A small served model, and requests to its application without a network."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import httpx
import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import redcoast as rc
from redcoast.models import Llama, LlamaConfig
from redcoast.serve._application import make_app
from redcoast.serve._batching import Queue
from redcoast.serve._load_served import load_served

TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('The user begins.') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def byte_level():
    """A tokenizer of the 256 bytes of UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_weights(directory, template=TEMPLATE, **config):
    """A small language model of bytes in Hugging Face's layout, with a chat template."""
    sizes: dict[str, Any] = {
        "vocab": 256,
        "width": 32,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "hidden": 32,
    }
    rc.save_pretrained(Llama(LlamaConfig(**sizes | config), key=jax.random.key(0)), directory)
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def load(directory, rows=4, context=64):
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    served, server = load_served(directory, mesh=mesh, rows=rows, context=context)
    # All batches have the same number of rows, so that they are one program.
    return replace(served, multiple=rows), server


@contextlib.asynccontextmanager
async def client_of(loaded, waiting=8, **options):
    served, server = loaded
    fresh = replace(server, queue=Queue(waiting, served.rows, served.context))
    app = make_app(served, fresh, wait=0.05, **options)
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost/v1")
    async with app.router.lifespan_context(app), client:
        yield client


def together(loaded, *calls, **options):
    """The responses to requests that are made at once: paths and bodies."""

    async def run():
        async with client_of(loaded, **options) as client:
            posts = [client.post(path, json={"model": "tiny"} | body) for path, body in calls]
            return await asyncio.gather(*posts)

    return asyncio.run(run())


def streamed(response):
    lines = response.text.strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]
