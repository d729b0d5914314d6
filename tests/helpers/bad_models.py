"""Bad inputs to what concerns models, checkpoints and loggers."""

# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
from bad_helpers import (
    KEY,
    TINY,
    deleted,
    generate,
    llama,
    saved,
    written,
)
from problem import make_model

import redcoast as rc
from redcoast import lora, losses, models

LOGS = [jnp.zeros(4), jnp.zeros(4), jnp.zeros(4), jnp.zeros(4)]
TOKENS = jnp.zeros((4, 3))
ROW = np.array([[3, 4, 5]])

ROWS = {
    "Checkpoints": [
        (lambda d: rc.Checkpoints(d, every=0), ValueError, "every` is 0"),
        (lambda d: rc.Checkpoints(d, keep=0), ValueError, "keep` is 0"),
        (lambda d: rc.Checkpoints(d, every=2.5), TypeError, r"every` is 2\.5"),
        (lambda d: rc.Checkpoints(d, mode="best"), ValueError, "mode` is 'best'"),
        (lambda d: rc.Checkpoints(3), TypeError, "directory"),
        (lambda d: rc.Checkpoints(d, mode=np.ones(2)), TypeError, "mode` is of type ndarray"),
        (lambda d: rc.Checkpoints(d, every=deleted()), TypeError, "every` is of type jax.Array"),
        (lambda d: rc.Checkpoints(d, best=3), TypeError, "best` is 3"),
        (lambda d: rc.Checkpoints(d, resume="no"), TypeError, "resume` is 'no'"),
    ],
    "save_checkpoint": [
        (lambda d: rc.save_checkpoint(d / "c", {"w": deleted()}), ValueError, "array at w can no"),
        (
            lambda d: jax.jit(lambda w: rc.save_checkpoint(d / "c", {"w": w}))(jnp.ones(2)),
            TypeError,
            "`save_checkpoint` was called inside.*no values yet",
        ),
        (lambda d: rc.save_checkpoint(d, {"w": np.ones(2)}), ValueError, "exists already"),
        (lambda d: rc.save_checkpoint(d / "c", {"w": 3}), ValueError, "no array"),
        (
            lambda d: rc.save_checkpoint(d / "c", {"w": np.ones(2)}, metadata={"f": print}),
            TypeError,
            "`metadata`",
        ),
        (
            lambda d: rc.save_checkpoint(d / "c", {"a.b": np.ones(2), "a": {"b": np.ones(2)}}),
            ValueError,
            "a.b",
        ),
        (
            lambda d: rc.save_checkpoint(d / "c", {"w": np.array(["text"])}),
            (TypeError, ValueError),
            "w",
        ),
    ],
    "load_checkpoint": [
        (lambda d: rc.load_checkpoint(None), TypeError, "`path` is None. It must be a path"),
        (lambda d: rc.load_checkpoint(saved(d), subtree=0), TypeError, "`subtree` is 0"),
        (lambda d: rc.load_checkpoint(saved(d), shardings={}), ValueError, "pass `like` too"),
        (
            lambda d: jax.jit(lambda x: rc.load_checkpoint(d / "none", x))(jnp.ones(2)),
            TypeError,
            "`load_checkpoint` was called inside",
        ),
        (lambda d: rc.load_checkpoint(d / "none"), FileNotFoundError, "no checkpoint at.*none"),
        (
            lambda d: rc.load_checkpoint(saved(d), {"v": np.ones((2, 3), np.float32)}),
            ValueError,
            "v",
        ),
        (
            lambda d: rc.load_checkpoint(saved(d), {"w": np.ones((3, 3), np.float32)}),
            ValueError,
            "w",
        ),
        (lambda d: rc.load_checkpoint(saved(d), {"w": np.ones((2, 3), np.int32)}), ValueError, "w"),
        (lambda d: rc.load_checkpoint(saved(d), subtree="x"), ValueError, "'x'"),
    ],
    "learning_rate_schedule": [
        (
            lambda d: rc.learning_rate_schedule(
                1.0, examples=9, batch_size=3, steps=3, warmup=np.float32(1.5)
            ),
            ValueError,
            "float `warmup` .* 1.5",
        ),
        (
            lambda d: rc.learning_rate_schedule(1.0, examples=None, batch_size=3, epochs=3),
            TypeError,
            "`examples` is None",
        ),
        (
            lambda d: rc.learning_rate_schedule(True, examples=9, batch_size=3, steps=3),
            TypeError,
            "`peak` is True",
        ),
        (
            lambda d: rc.learning_rate_schedule(1.0, examples=9, batch_size=3, steps=True),
            TypeError,
            "`steps` is True",
        ),
        (
            lambda d: rc.learning_rate_schedule(1.0, examples=9, batch_size=3),
            ValueError,
            "one of `epochs` and `steps`; neither",
        ),
        (
            lambda d: rc.learning_rate_schedule(-1.0, examples=9, batch_size=3, steps=3),
            ValueError,
            "`peak` must be .* -1",
        ),
        (
            lambda d: rc.learning_rate_schedule(1.0, examples=0, batch_size=3, steps=3),
            ValueError,
            "`examples` is 0",
        ),
        (
            lambda d: rc.learning_rate_schedule(1.0, examples=9, batch_size=3, steps=3, warmup=9),
            ValueError,
            "`warmup` must be .* 9",
        ),
        (
            lambda d: rc.learning_rate_schedule(1.0, examples=9, batch_size=3, steps=3, warmup=1.5),
            ValueError,
            "float `warmup` .* 1.5",
        ),
        (
            lambda d: rc.learning_rate_schedule(1.0, examples=9, batch_size=3, steps=3, end=2.0),
            ValueError,
            "`end` must be .* 2",
        ),
        (
            lambda d: rc.learning_rate_schedule(
                1.0, examples=9, batch_size=3, steps=3, decay="exp"
            ),
            ValueError,
            "'exp'",
        ),
        (
            lambda d: rc.learning_rate_schedule("3e-4", examples=9, batch_size=3, steps=3),
            TypeError,
            "`peak` is '3e-4'",
        ),
    ],
    "loggers": [
        (lambda d: rc.console_logger(every=-1), ValueError, "`every` is -1. It must be at least 0"),
        (lambda d: rc.console_logger(every="1"), TypeError, "`every` is '1'"),
        (lambda d: rc.wandb_logger(project="p", config=3), TypeError, "`config` is of type int"),
        (lambda d: rc.wandb_logger(project=3), TypeError, "`project` is 3"),
        (lambda d: rc.trackio_logger(project="p", config=3), TypeError, "`config` is of type int"),
        (lambda d: rc.trackio_logger(project=3), TypeError, "`project` is 3"),
        (
            lambda d: rc.wandb_logger(project="p", close_timeout=-1),
            ValueError,
            "`close_timeout` is -1. It must be at least 0",
        ),
        (
            lambda d: rc.wandb_logger(project="p", queue_size=0),
            ValueError,
            "`queue_size` is 0",
        ),
        (lambda d: rc.wandb_logger("p", queue_size=2.5), TypeError, r"`queue_size` is 2\.5"),
        (lambda d: rc.wandb_logger("p", close_timeout="1"), TypeError, "`close_timeout` is '1'"),
        (lambda d: rc.progress_logger("yes"), TypeError, "`enabled` is 'yes'.*True or False"),
        (lambda d: rc.jsonl_logger(None), TypeError, "`path` is None. It must be a path"),
        (lambda d: rc.read_metrics(3), TypeError, "`path` is 3. It must be a path"),
        (lambda d: rc.read_metrics(d / "none.jsonl"), FileNotFoundError, "none.jsonl"),
    ],
    "Decoding": [
        (lambda d: rc.Decoding(temperature="hot"), TypeError, "`temperature` is 'hot'.*a number"),
        (lambda d: rc.Decoding(top_k=5), ValueError, "`top_k=5` only applies to sampling"),
        (lambda d: rc.Decoding(min_p=2.0, temperature=1.0), ValueError, r"`min_p` is 2\.0"),
        (lambda d: rc.Decoding(repetition_penalty=0), ValueError, "`repetition_penalty` is 0"),
        (lambda d: rc.Decoding(early_stopping="no", beams=2), ValueError, "`early_stopping`"),
        (lambda d: rc.Decoding(early_stopping=True), ValueError, "`early_stopping=True` only"),
        (lambda d: rc.Decoding(num_return_sequences=2), ValueError, "`num_return_sequences` is 2"),
        (lambda d: rc.Decoding(bad_words=[[]]), ValueError, "`bad_words` holds an empty"),
        (lambda d: rc.Decoding(suppress=[1.5]), TypeError, r"`suppress` is 1\.5"),
        (lambda d: rc.Decoding(prefix=[1.5]), TypeError, r"`prefix` is 1\.5"),
        (lambda d: rc.Decoding(no_repeat_ngram_size=-1), ValueError, "`no_repeat_ngram_size`"),
        (lambda d: rc.Decoding(beams=True), TypeError, "`beams` is True"),
        (lambda d: rc.Decoding(eos=[True]), TypeError, "`eos` is True"),
        (lambda d: rc.Decoding(temperature=True), TypeError, "`temperature` is True"),
    ],
    "log_probabilities": [
        (lambda d: rc.log_probabilities(llama(), np.ones(3, int)), ValueError, r"shape \(3,\)"),
        (
            lambda d: rc.log_probabilities(llama(), [["a"]]),
            TypeError,
            "or a list of rows of integers",
        ),
        (
            lambda d: rc.log_probabilities(
                llama(), np.ones((1, 3), int), mask=np.ones((1, 1), bool)
            ),
            ValueError,
            "`mask` has shape",
        ),
        (
            lambda d: rc.log_probabilities(llama(), ROW, exact=1),
            TypeError,
            "`exact` is 1",
        ),
        (lambda d: rc.log_probabilities(print, ROW), TypeError, "needs a decoder"),
    ],
    "generate": [
        (lambda d: generate(top_q=3), TypeError, "no option top_q"),
        (lambda d: generate(suppress=[99]), ValueError, "`suppress` has 99"),
        (lambda d: generate(max_new_tokens=0), ValueError, "`max_new_tokens` is 0"),
        (lambda d: generate(max_new_tokens=2.0), TypeError, r"`max_new_tokens` is 2\.0"),
        (lambda d: generate(rows=0), ValueError, "`rows` is 0"),
        (lambda d: generate(rows=1.5), TypeError, "`rows` is 1.5"),
        (lambda d: generate(log_probabilities=1), TypeError, "`log_probabilities` is 1"),
        (lambda d: generate(exact=1), TypeError, "`exact` is 1"),
        (lambda d: generate(exact=True, rows=1), ValueError, "not supported with `rows`"),
        (lambda d: generate(temperature=-1.0), ValueError, r"`temperature` is -1\.0"),
        (lambda d: generate(temperature=1.0), ValueError, "needs a `key`"),
        (lambda d: generate(temperature=1.0, key=KEY, top_p=2.0), ValueError, "`top_p` is 2"),
        (lambda d: generate(temperature=1.0, key=KEY, top_k=0), ValueError, "`top_k` is 0"),
        (lambda d: generate(beams=0), ValueError, "`beams` is 0"),
        (lambda d: generate(beams=2, temperature=1.0, key=KEY), ValueError, "`beams`"),
        (lambda d: generate(np.ones((1, 0), np.int32)), ValueError, r"\(1, 0\)"),
        (lambda d: generate(np.ones(3, np.int32)), ValueError, r"shape \(3,\)"),
        (lambda d: generate(np.ones((1, 3), np.float32)), ValueError, "float32"),
        (lambda d: generate(np.full((1, 3), 99)), ValueError, "99"),
        (lambda d: generate([["a", "b"]]), TypeError, "`tokens`.*list"),
        (lambda d: generate([1, 2]), ValueError, r"For one prompt, pass `\[tokens\]`"),
        (lambda d: generate([[1, 2], [3]]), ValueError, "from 1 to 2 tokens. Pad them"),
        (lambda d: generate(mask=np.ones((1, 2), bool)), ValueError, r"`mask`.*\(1, 2\)"),
        (lambda d: generate(eos=(99,)), ValueError, "`eos` has 99"),
        (
            lambda d: rc.generate(make_model(), np.ones((1, 3), np.int32), max_new_tokens=2),
            TypeError,
            "MLP cannot generate",
        ),
    ],
    "load_pretrained": [
        (lambda d: rc.load_pretrained(d / "none"), FileNotFoundError, "nothing at.*none"),
        (
            lambda d: rc.load_pretrained(written(d / "e" / "config.json", "{}")),
            ValueError,
            "e holds neither",
        ),
        (
            lambda d: rc.load_pretrained(written(d / "g" / "a.gguf", "GGUF") / "a.gguf"),
            ValueError,
            "a.gguf is damaged",
        ),
        (
            lambda d: rc.load_pretrained(written(d / "h" / "a.bin", "") / "a.bin"),
            ValueError,
            "a.bin",
        ),
        (lambda d: rc.load_pretrained(3), TypeError, "path"),
        (lambda d: rc.load_pretrained(d, quantise="int4"), ValueError, "`quantise`.*'int4'"),
        (lambda d: rc.load_tokenizer(3), TypeError, "`path`"),
        (lambda d: rc.load_tokenizer(d / "none"), FileNotFoundError, "There is no .*none"),
        (
            lambda d: rc.load_tokenizer(written(d / "t" / "tokenizer.json", "{}")),
            ValueError,
            "tokenizer.json is not a tokenizer",
        ),
        (lambda d: rc.load_chat_template(3), TypeError, "`path`"),
        (lambda d: rc.load_chat_template(d / "none"), FileNotFoundError, "There is no .*none"),
        (
            lambda d: rc.load_chat_template(written(d / "t" / "chat_template.jinja", "{% if")),
            ValueError,
            "chat template that cannot be used",
        ),
    ],
    "save_pretrained": [
        (lambda d: rc.save_pretrained(make_model(), d / "m"), ValueError, "but got a MLP"),
        (
            lambda d: rc.save_pretrained(llama(), written(d / "n" / "x", "")),
            ValueError,
            "n exists already",
        ),
        (lambda d: rc.save_pretrained(llama(), d / "m", card="mit"), TypeError, "`card`"),
    ],
    "models": [
        (lambda d: llama(heads=3), ValueError, "`width`.*`heads`|`heads`"),
        (lambda d: llama(heads=4, kv_heads=3), ValueError, "`kv_heads`"),
        (lambda d: llama(layers=0), ValueError, "`layers`"),
        (lambda d: llama(width=-8), ValueError, "`width`"),
        (lambda d: llama(vocab=2.5), TypeError, "`vocab`"),
        (lambda d: models.Llama(models.LlamaConfig(**TINY), key=0), TypeError, "PRNG key"),
        (
            lambda d: models.shift_right(np.zeros((2, 0), np.int32), start=1),
            ValueError,
            "nothing to shift",
        ),
        (
            lambda d: models.shift_right(np.zeros((2, 3), np.int32), start=-1),
            ValueError,
            "`start` is -1",
        ),
    ],
    "losses": [
        (lambda d: losses.cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2)), ValueError, "`targets`"),
        (
            lambda d: losses.cross_entropy(jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)),
            ValueError,
            r"`targets`.*\(3,\)",
        ),
        (
            lambda d: losses.cross_entropy(
                jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), mask=jnp.ones(3)
            ),
            ValueError,
            "`mask`",
        ),
        (
            lambda d: losses.chunked_cross_entropy(
                jnp.zeros((2, 3, 4)), lambda h: h, jnp.zeros((2, 3), jnp.int32), chunk=0
            ),
            ValueError,
            "`chunk` is 0",
        ),
        (
            lambda d: losses.token_log_probabilities(
                jnp.zeros((2, 3, 4)), lambda h: h, jnp.zeros((2, 4), jnp.int32)
            ),
            ValueError,
            r"`tokens` must have shape \(2, 3\)",
        ),
        (lambda d: losses.pairwise_sigmoid(jnp.zeros((2, 3))), ValueError, r"shape \(2, 3\)"),
        (lambda d: losses.dpo(*LOGS, beta=0.0), ValueError, "`beta` is 0.0"),
        (lambda d: losses.dpo(*LOGS, label_smoothing=0.5), ValueError, "`label_smoothing` is 0.5"),
        (lambda d: losses.dpo(*LOGS[:3], jnp.zeros(3)), ValueError, r"`reference_rejected` \(3,\)"),
        (lambda d: losses.ipo(*LOGS, beta=-1), ValueError, "`beta` is -1"),
        (
            lambda d: losses.kto(
                *LOGS[:2], jnp.ones(3, bool), unrelated=LOGS[0], reference_unrelated=LOGS[0]
            ),
            ValueError,
            r"`desirable` \(3,\)",
        ),
        (lambda d: losses.orpo(LOGS[0], jnp.zeros((4, 1))), ValueError, r"`rejected` \(4, 1\)"),
        (lambda d: losses.orpo(*LOGS[:2], weight=-1), ValueError, "`weight` is -1"),
        (lambda d: losses.simpo(*LOGS[:2], gamma=-0.5), ValueError, "`gamma` is -0.5"),
        (lambda d: losses.bradley_terry(jnp.zeros(0), jnp.zeros(0)), ValueError, "one number for"),
        (
            lambda d: losses.grpo(TOKENS, TOKENS, LOGS[0], mask=TOKENS[:, 1:]),
            ValueError,
            r"`mask` has shape \(4, 2\)",
        ),
        (
            lambda d: losses.grpo(TOKENS, TOKENS, jnp.zeros(2), mask=TOKENS),
            ValueError,
            "`advantages`.*one number for each answer",
        ),
        (
            lambda d: losses.grpo(LOGS[0], LOGS[0], LOGS[0], mask=LOGS[0]),
            ValueError,
            "`log_probs` must have the shape",
        ),
        (
            lambda d: losses.dapo(TOKENS, TOKENS, LOGS[0], mask=TOKENS, clip=(1.5, 0.2)),
            ValueError,
            r"`clip` is \(1.5, 0.2\)",
        ),
        (
            lambda d: losses.dr_grpo(TOKENS, TOKENS, LOGS[0], mask=TOKENS, max_tokens=0),
            ValueError,
            "`max_tokens` is 0",
        ),
        (
            lambda d: losses.grpo_advantages(jnp.zeros((3, 1))),
            ValueError,
            r"at least two samples.*\(3, 1\)",
        ),
        (lambda d: losses.rloo_advantages(jnp.zeros(3)), ValueError, "at least two samples"),
        (lambda d: losses.kl_estimate(TOKENS, TOKENS, kind="k4"), ValueError, "`kind` is 'k4'"),
        (lambda d: losses.kl_estimate(TOKENS, TOKENS[1:]), ValueError, "must have the same shape"),
        (
            lambda d: losses.reverse_kl(TOKENS, TOKENS[:, 1:]),
            ValueError,
            r"`teacher_logits` has shape \(4, 2\)",
        ),
    ],
    "lm_eval_model": [
        (lambda d: rc.lm_eval_model(llama(), None, batch_size=0), ValueError, "`batch_size`.*0"),
        (lambda d: rc.lm_eval_model(llama(), None, max_new_tokens=1.5), TypeError, "`max_new"),
        (lambda d: rc.lm_eval_model(llama(), None, context=-1), ValueError, "`context`.*-1"),
        (lambda d: rc.lm_eval_model(llama(), None), ValueError, "no `eos`"),
    ],
    "pass_at_k": [
        (lambda d: rc.pass_at_k([[1, 0]], 0), ValueError, "`k`.*0"),
        (lambda d: rc.pass_at_k([[1, 0]], 1.5), TypeError, "`k`.*integer"),
        (lambda d: rc.pass_at_k([[1, 0]], 3), ValueError, "`k` is 3.*2 answers"),
        (lambda d: rc.pass_at_k(np.zeros((0, 4)), 1), ValueError, r"at least one.*\(0, 4\)"),
        (lambda d: rc.pass_at_k(np.zeros(4), 1), ValueError, r"\(problems, samples\).*\(4,\)"),
        (lambda d: rc.pass_at_k([[1, 0], [1]], 1), ValueError, "same number of answers"),
        (lambda d: rc.pass_at_k([[1, 0.1]], 1), ValueError, "`rewards >= 1`"),
        (lambda d: rc.pass_at_k([[1, np.nan]], 1), ValueError, "other values"),
        (lambda d: rc.pass_at_k([[1, 0]], 1, level=1.0), ValueError, "`level` is 1.0"),
    ],
    "win_rate": [
        (lambda d: rc.win_rate(-1, 3), ValueError, "`wins`.*-1"),
        (lambda d: rc.win_rate(1, 3, ties=0.5), TypeError, "`ties`.*integer"),
        (lambda d: rc.win_rate(0, 0), ValueError, "at least one game"),
        (lambda d: rc.win_rate(1, 3, level=95), ValueError, "`level` is 95.*such as 0.95"),
    ],
    "lora": [
        (lambda d: lora.add_adapters(llama(), 0, targets="wq", key=KEY), ValueError, "`rank`.*0"),
        (
            lambda d: lora.add_adapters(llama(), 2, targets="nothing", key=KEY),
            ValueError,
            "'nothing'",
        ),
        (lambda d: lora.add_adapters(llama(), 2, targets="[", key=KEY), ValueError, r"'\['"),
        (lambda d: lora.add_adapters(llama(), 2.0, targets="wq", key=KEY), TypeError, "`rank`"),
        (lambda d: lora.quantise(llama(), "int4"), ValueError, "`numbers`.*int4"),
        (lambda d: lora.trainable(llama()), ValueError, "no adapters"),
        (lambda d: lora.adapters(llama()), ValueError, "no adapters"),
        (lambda d: lora.with_adapters(llama(), llama()), ValueError, "there are none"),
        (lambda d: lora.load_adapters(llama(), d / "none"), FileNotFoundError, "none"),
        (lambda d: lora.save_adapters(llama(), d / "l"), ValueError, "no adapters"),
    ],
}
