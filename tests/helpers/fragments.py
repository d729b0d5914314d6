"""The blocks of the docs that do not run with their page: what each needs, or where it runs."""

import dataclasses

PROCESSES = """
import equinox as eqx, grain, jax, jax.numpy as jnp, numpy as np, optax, redcoast as rc
rows = list(np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))

def train(examples):
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    loss_fn = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch) ** 2)
    options = {"loss_fn": loss_fn, "batch_size": 16, "epochs": 2}
    assert int(rc.fit(model, optax.sgd(0.1), examples, **options).step) == 8
"""
ROWS = """
import numpy as np, optax, redcoast as rc
inputs = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
examples = [(x, np.int32(x.sum() > 0)) for x in inputs]
collate_fn = lambda examples: tuple(np.stack(column) for column in zip(*examples, strict=True))
"""
PARTS = """
import tempfile, jax, numpy as np, redcoast as rc
from pathlib import Path
from jax.sharding import NamedSharding, PartitionSpec as P
folder = Path(tempfile.mkdtemp())
sharding = NamedSharding(rc.make_mesh(), P(None, None, "data"))
"""
FLAX = (
    ROWS
    + """
import jax
from flax import linen as nn, nnx
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
x, y = collate_fn(examples)
batches = [(x, y), (x, y)]
optimizer, key = optax.adamw(1e-3), jax.random.key(0)
"""
)
LINEN = (
    FLAX
    + """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=False)(x))
module = Net()
"""
)
PLAIN = FLAX + "module = nn.Dense(2)\n"
NNX = (
    FLAX
    + """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
    def __call__(self, x):
        return self.out(self.norm(x))
module = Net(nnx.Rngs(0))
"""
)
REDCO = (
    ROWS
    + """
import jax, jax.numpy as jnp
from flax import linen as nn
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(64)(x)))
model = Net()
params = model.init(jax.random.key(0), inputs)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels
"""
)
ACCELERATE = """
import torch, torch.nn.functional as F
from accelerate import Accelerator
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(2, (64,)))
loader = torch.utils.data.DataLoader(data, 16)
"""
WHISPER = """
import jax, jax.numpy as jnp
from redcoast.models import Whisper, WhisperConfig
config = WhisperConfig(vocab=51865, width=16, layers=1, decoder_layers=1, heads=2, hidden=32)
model = Whisper(config, key=jax.random.key(0))
features = jnp.zeros((2, 80, config.frames))
"""
CHAT = """
from pathlib import Path
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
letters = Tokenizer(models.WordLevel({"A": 0, "text": 1, "<unk>": 2}, unk_token="<unk>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>")
tokenizer.chat_template = "{{ messages[0].content }}"
tokenizer.save_pretrained("model")
"""
PARQUET = """
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
table = pa.table({"x": np.zeros((64, 8), np.float32).tolist()})
pq.write_table(table, "data.parquet")
"""
ONNX = """
import equinox as eqx, jax
model = eqx.nn.MLP(8, 8, 32, depth=2, key=jax.random.key(0))
predict = lambda x: jax.vmap(model)(x)
"""

LOOKAHEAD = """
import equinox as eqx, jax, jax.numpy as jnp, optax
import redcoast as rc

key, batch = jax.random.key(0), jnp.ones((8, 4))
create = lambda key: eqx.nn.Linear(4, 2, key=key)
loss_fn = lambda model, batch, key: jnp.mean(jax.vmap(model.fast)(batch) ** 2)
"""


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A block of a page, found by a line of it.

    **Arguments:**

    - `page`: the page, in `docs/`.
    - `line`: a part of a line that only this block has.
    - `setup`: what the block takes for granted.
    - `after`: the number of the page's own programs (```python blocks) that run before it.
    - `needs`: packages that the project's tests do without (`nox -s fragments` installs them).
    - `elsewhere`: what the block needs that no test has, or which test runs it.
    """

    page: str
    line: str
    setup: str = ""
    after: int = 0
    needs: tuple[str, ...] = ()
    elsewhere: str = ""


FRAGMENTS = (
    Fragment("hosts.md", "from xmanager import xm", elsewhere="Google Cloud"),
    Fragment("launchers.md", "from kubeflow.trainer", elsewhere="tests/launchers/jobs_recipes.py"),
    Fragment("launchers.md", "from ray.train", elsewhere="TPUs; tests/launchers/jobs_ray.py"),
    Fragment("launchers.md", "kind: TrainJob", elsewhere="tests/launchers/jobs_recipes.py"),
    Fragment("launchers.md", "kind: JobSet", elsewhere="tests/launchers/jobs_recipes.py"),
    Fragment("hosts.md", "kind: Job", elsewhere="tests/launchers/jobs_recipes.py"),
    Fragment("training.md", "jax_compilation_cache_dir", setup="import jax"),
    Fragment("troubleshooting.md", "optax.lookahead", LOOKAHEAD),
    Fragment("howto/hugging_face.md", "load_dataset", elsewhere="Hugging Face's hub"),
    Fragment("howto/hugging_face.md", "AutoTokenizer", CHAT, needs=("transformers",)),
    Fragment("howto/serving.md", "OpenAI(", elsewhere="tests/serve/test_server.py"),
    Fragment("howto/post_training.md", "import lm_eval", elsewhere="tests/serve/scores_lm_eval.py"),
    Fragment(
        "howto/solvers.md", "diffeqsolve", elsewhere="experiments/benchmarks/local_regions.py"
    ),
    Fragment("howto/sources.md", "pq.write_table", after=1, needs=("datasets",)),
    Fragment("howto/sources.md", "import pyarrow.dataset", PARQUET, after=1, needs=("pyarrow",)),
    Fragment("howto/sources.md", "from_list(rows)", "import datasets", 1, needs=("datasets",)),
    Fragment("howto/sources.md", "StatefulDataLoader", after=1, needs=("torchdata",)),
    Fragment("howto/large_examples.md", "import zarr", PARTS, needs=("zarr",)),
    Fragment("howto/sources.md", "import webdataset", after=1, needs=("webdataset",)),
    Fragment("howto/sources.md", "mp_prefetch", PROCESSES),
    Fragment("tracking.md", "trackio_logger(project", after=1, needs=("trackio",)),
    Fragment("howto/export.md", "to_onnx", ONNX, needs=("jax2onnx",)),
    Fragment("models.md", "decoder_start", WHISPER),
    Fragment("migration/flax.md", "# Flax NNX", FLAX, needs=("flax",)),
    Fragment("migration/flax.md", "# Linen", PLAIN, needs=("flax",)),
    Fragment("migration/flax.md", "# NNX", NNX, needs=("flax",)),
    Fragment("migration/flax.md", "mutable=[", LINEN, needs=("flax",)),
    Fragment("migration/redco.md", "# Redco", REDCO, needs=("flax", "redco")),
    Fragment("migration/accelerate.md", "# Accelerate", ACCELERATE, needs=("accelerate", "torch")),
    Fragment("migration/levanter.md", "# Levanter", elsewhere="Hugging Face's hub"),
)
