"""`fit`, `evaluate` and `predict_examples`: the loops, what they check, and when they stop.

`_fit.py` tells a run from its arguments, which are one record (`_run_settings.py`), to its last
checkpoint. `_setup.py` has what precedes the first step, `_training_loop.py` the steps, evaluations
and saves, `_calls.py` how many steps are taken in a call, and `_steps.py` the innermost loop of a
user's own. `_evaluate.py` has the two loops that do not train, and `_evaluation.py` the evaluations
of a run, by which `_early_stopping.py` ends it. `_stop.py` has signals, `_nonfinite.py` the reasons
of a step that was skipped, and `_consistency.py` what processes have to agree on.
"""
