"""Training and generation with the LLaMA of `gpu.py` in PyTorch, on the same GPU.

    pip install torch transformers && python experiments/benchmarks/gpu_torch.py
    python experiments/benchmarks/gpu_torch.py --generate

The model is that of `transformers` with random weights, compiled by `torch.compile`. Parameters are
in float32, and products are computed in bfloat16 (autocast) with PyTorch's fused attention and
fused AdamW. The loss is the mean cross-entropy, as in `gpu.py`. It prints tokens per second, the
median time of a step, and the peak of allocated memory.

With `--generate`, `generate` of `transformers` continues prompts of 128 random tokens in bfloat16,
greedily. The time of a token is the difference between the median times of three calls with 256 and
with 16 new tokens, divided by 240. With `--static`, the cache has a fixed size, for which
`transformers` compiles the model.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from torch.nn.functional import cross_entropy  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

VOCAB, SEQ, WARM_UP = 32000, 2048, 5
# Of generation: tokens of a prompt, the two numbers of new tokens, and measurements.
PROMPT, FEW, MANY, ROUNDS = 128, 16, 256, 3


def make_model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=SEQ,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(dtype)


def train(batch: int, steps: int, compiled: bool) -> None:
    model = make_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    if compiled:
        loss_of = torch.compile(loss_of)
    shape = (steps + WARM_UP, batch, SEQ + 1)
    batches = np.random.default_rng(0).integers(0, VOCAB, shape, np.int64)
    times, loss = [], None
    first = time.perf_counter()
    for tokens in batches:
        loss = loss_of(torch.from_numpy(tokens).to("cuda", non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    seconds = np.diff(times)[WARM_UP - 1 :]
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "compiled": compiled,
        "batch": batch,
        "tokens/s": batch * SEQ * len(seconds) / float(seconds.sum()),
        "median step, ms": 1e3 * statistics.median(seconds.tolist()),
        "first step, s": times[0] - first,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        "loss": loss and float(loss),
    }
    print(json.dumps(report))


def generate(batch: int, static: bool) -> None:
    model = make_model(torch.bfloat16).eval()
    prompts = np.random.default_rng(0).integers(0, VOCAB, (batch, PROMPT), np.int64)
    tokens = torch.from_numpy(prompts).to("cuda")
    greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if static:
        greedy["cache_implementation"] = "static"

    def seconds_of(new: int) -> float:
        times = []
        for _ in range(1 + ROUNDS):  # the first warms up
            torch.cuda.synchronize()
            begin = time.perf_counter()
            model.generate(tokens, max_new_tokens=new, min_new_tokens=new, **greedy)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    seconds_per_token = (seconds_of(MANY) - seconds_of(FEW)) / (MANY - FEW)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "static": static,
        "batch": batch,
        "transformers": transformers.__version__,
        "tokens/s": batch / seconds_per_token,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--static", action="store_true")
    options = parser.parse_args()
    if options.generate:
        generate(options.batch, options.static)
    else:
        train(options.batch, options.steps, not options.eager)
