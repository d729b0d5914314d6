"""Training of the LLaMA of `gpu.py` with PyTorch, on the same GPU.

    pip install torch transformers && python experiments/benchmarks/gpu_torch.py

The model is that of `transformers` with random weights, compiled by `torch.compile`. Parameters are
in float32, and products are computed in bfloat16 (autocast) with PyTorch's fused attention and
fused AdamW. The loss is the mean cross-entropy, as in `gpu.py`. It prints tokens per second, the
median time of a step, and the peak of allocated memory.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn.functional import cross_entropy  # pyright: ignore[reportMissingImports]
from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

VOCAB, SEQ, WARM_UP = 32000, 2048, 5


def main(batch: int, steps: int, compiled: bool) -> None:
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
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4, fused=True)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1]).logits
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    main(options.batch, options.steps, not options.eager)
