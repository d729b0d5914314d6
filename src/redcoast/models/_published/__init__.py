"""How published checkpoints say what the models here are: a family a file, with `read` (settings
of a `config.json` to fields of its configuration), `write` (back) and `tensors` (what each array
is made of)."""
