"""Tokens per second of `rc.generate` and of `transformers` with torch: SmolLM2-135M on the CPU.

Both have the same weights in float32 and the same number of threads. Both extend the same prompts
of 32 tokens greedily by 128 tokens, and take turns in one process. A ratio above 1 means that
`rc.generate` is faster. Needs torch, transformers and gguf (`nox -s bench_torch`).

    python experiments/benchmarks/generation.py
"""

# pyright: reportMissingImports=false

from dataclasses import dataclass

import numpy as np
import torch
import tyro
from reference import both_models, describe, take_turns

import redcoast as rc


@dataclass(frozen=True)
class Config:
    new: int = 128  # number of tokens to generate for each prompt
    prompt: int = 32  # number of tokens in a prompt
    rounds: int = 5  # number of measurements of each


def main(c: Config) -> None:
    ours, theirs = both_models()
    print(describe())
    for batch in (1, 8):
        tokens = np.random.default_rng(0).integers(0, 49152, (batch, c.prompt))
        found = {}

        def generate_here(tokens=tokens, found=found):
            found["ours"] = np.asarray(rc.generate(ours, tokens, max_new_tokens=c.new, eos=()))

        def generate_there(tokens=tokens, found=found):
            ids = torch.tensor(tokens)
            out = theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=c.new,
                min_new_tokens=c.new,
                do_sample=False,
                pad_token_id=0,
            )
            found["theirs"] = out[:, c.prompt :].numpy()

        times = take_turns(generate_here, generate_there, c.rounds)
        speeds = {name: batch * c.new / times[name] for name in ("ours", "theirs")}
        alike = np.mean(found["ours"] == found["theirs"])
        print(
            f"batch {batch}: redcoast {speeds['ours']:.1f} tokens/s, transformers "
            f"{speeds['theirs']:.1f}, ratio {times['ratio']:.2f} (at least 1.0); {alike:.1%} of "
            "the tokens are equal",
            flush=True,
        )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
