"""The training step: a state, a loss and its gradients, precision, accumulation, compilation.

`_state.py` creates the state. The step in `_step.py` is a pure function: `_loss.py` calls the
user's loss, `_microbatches.py` differentiates it, and `_optimizer.py` calls the optimizer.
`_training.py` has what a step depends on, as one record, and `_plan_step.py` plans it.
`_compile.py` compiles steps over the shardings of a plan, `_programs.py` keeps what was compiled
for later runs, and `_prepare.py` does all of it for a loop of the user's own.

`_divide.py` divides the matrices of `_muon.py`, `_soap.py` and `_shampoo.py` over devices, which
send them to each other with `_exchange.py`.
"""
