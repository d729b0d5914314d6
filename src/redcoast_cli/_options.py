"""The options of the commands. This module imports no JAX, so that `--help` is fast."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

T = TypeVar("T")
# An optional value; the text of the option says what is used by default.
Maybe = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]

Model = Annotated[str, tyro.conf.arg(metavar="MODEL")]
Mesh = Annotated[str, tyro.conf.arg(metavar="MESH")]
Seq = Annotated[Maybe[int], tyro.conf.arg(metavar="TOKENS")]
Batch = Annotated[Maybe[int], tyro.conf.arg(aliases=["--batch-size"])]


@dataclass(frozen=True)
class DryRunCommand:
    """Compiles a training step for accelerators that you do not have, and prints what it needs.

    It reports whether the step fits, the memory on each device, the communication between devices,
    and the estimated time of a step; with --tokens, the hours of a training run. The figures are
    from the accelerator's own compiler if it is installed (`pip install "redcoast[tpu]"` or
    `"redcoast[cuda12]"`), and otherwise from the CPU compiler. The exit code is 1 if the step does
    not fit, and 2 if the options are invalid or the compiler fails.
    """

    model: Model = "llama-7b"  # a model name, or the path of a Hugging Face config.json
    target: str = "a100-40gb:4"  # TPU slice (v4:4x4x4), GPUs (l4:4; h100:8x8: hosts x cards), cpu:8
    seq: Seq = None  # sequence length in tokens; by default 1024 or the model's maximum
    batch: Batch = None  # global batch size; by default one sequence per device and microbatch
    mesh: Mesh = "auto"  # such as 8, 2x4 (data x model), pipe=2,fsdp=4; auto: the estimated best
    remat: Literal["auto", "none", "dots", "full"] = "full"  # rematerialised; auto: what is needed
    accumulate: int = 1  # number of microbatches for gradient accumulation
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute dtype; weights are float32
    chunk: Maybe[int] = None  # positions whose logits are in memory at a time; by default by size
    smallest: bool = False  # find the smallest number of chips on which the step fits
    longest: bool = False  # find the longest sequence that fits, a multiple of 128
    tokens: Maybe[float] = None  # number of tokens of a training run, such as 2e9; prints its hours
    price: Maybe[str] = None  # price of a device for an hour: 2.5, or h100=2.5,v5e=1.2
    targets: Maybe[str] = None  # compare targets in a table: h100:8,v5e:4x4,a100-40gb:8
    compare: bool = False  # compare all meshes; compile the best with and without stages (pipe)
    by_line: bool = False  # also print the lines of code that need most communication and memory
    html: Maybe[str] = None  # also write a page with the code and the cost of each line to a file
    json: bool = False  # print the figures as JSON instead of tables


@dataclass(frozen=True)
class PlanCommand:
    """Plans how a model's training step is sharded over a mesh, and prints the plan.

    Nothing is compiled, and no accelerator is needed. Memory and communication are estimates.
    """

    model: Model = "llama-7b"  # a model name, or the path of a Hugging Face config.json
    mesh: Mesh = "fsdp=8"  # such as 8, 2x4 (data x model), or pipe=2,fsdp=4; sizes are not -1
    seq: Seq = None  # sequence length in tokens; by default 1024 or the model's maximum
    batch: Batch = None  # global batch size; by default one sequence per device
    table: bool = False  # also print how each array is sharded, and why
    json: bool = False  # print the plan's report as JSON


@dataclass(frozen=True)
class ServeCommand:
    """Serves a pretrained language model over HTTP, with OpenAI's API for completions and chats.

    Concurrent requests are generated in batches. It needs the extra `serve` (`pip install
    "redcoast[serve]"`). See docs/howto/serving.md.
    """

    weights: Path  # Hugging Face directory or .gguf file
    name: Maybe[str] = None  # name of the model in requests; by default, the directory's name
    host: str = "127.0.0.1"  # address to listen at (0.0.0.0 for all networks)
    port: int = 8000  # port to listen at
    api_key: Maybe[str] = None  # key that clients must send; by default, REDCOAST_API_KEY
    mesh: Mesh = "data=-1"  # such as 8, 2x4 (data x model), fsdp=4,model=2, or auto
    dtype: str = "float32"  # dtype of the weights (such as bfloat16)
    rows: int = 8  # maximum number of answers to generate at once
    waiting: int = 64  # maximum number of waiting answers; further clients get status 429
    wait: float = 0.005  # seconds to wait for further requests before a batch starts
    timeout: float = 30.0  # seconds within which the headers and the body of a request must arrive
    context: int = 2048  # maximum number of tokens of a prompt and its answer
    new_tokens: int = 512  # default number of tokens of an answer in a chat
    seed: int = 0  # random seed for sampling
    local_devices: Maybe[int] = None  # number of CPU devices to emulate


@dataclass(frozen=True)
class DoctorCommand:
    """Prints versions, devices, compilers and W&B's mode, and the commands that install what is
    missing."""
