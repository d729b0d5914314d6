"""Generation in several processes, for tests: prints the tokens that this one gets.

decode.py '{"data": 2, "model": 2}' directory-of-weights
"""

import json
import sys

import jax
import numpy as np

import redcoast as rc

rc.initialize()
mesh = rc.make_mesh(**json.loads(sys.argv[1]))
model = rc.load_pretrained(sys.argv[2], mesh=mesh)
prompts = np.random.default_rng(0).integers(1, 64, (4, 6))
streamed = []
generated = rc.generate(model, prompts, max_new_tokens=5)
rc.generate(model, prompts, max_new_tokens=5, stream=lambda x: streamed.append(x.tolist()))
predicted = rc.predict_examples(
    model,
    list(prompts),
    collate_fn=np.stack,
    predict_fn=lambda model, batch, key: rc.generate(model, batch, max_new_tokens=5, beams=2),
    batch_size=4,
    mesh=mesh,
)
actual = {
    "generated": np.asarray(generated).tolist(),
    "streamed": np.array(streamed).T.tolist(),
    "predicted": [x.tolist() for x in predicted],
}
try:
    rc.generate(model, prompts + jax.process_index(), max_new_tokens=5)
except ValueError as error:
    actual["differing"] = str(error)
try:
    rc.generate(model, prompts, max_new_tokens=5, repetition_penalty=1.5 + jax.process_index())
except ValueError as error:
    actual["other option"] = str(error)
print("RESULT " + json.dumps(actual), flush=True)
