"""A plan as data and as text: shares, tables, reasons, and what a loss does with its examples.

`_data.py` has the data, also for `json.dumps`. These make it, from what the solver has chosen:

- `_reasons.py`: why each array and the batch are sharded as they are; `_not_done.py`: what the mesh
  asks for in vain.
- `_traffic.py`: what devices send, by cause, with `_sent.py` (functions on the host) and
  `_constraint_traffic.py` (shardings that the program asks for). `_lines.py` has it by the lines of
  the user's code, and `_repeated.py` the arithmetic that every device does.
- `_update_traffic.py`: what the optimizer's update sends.
- `_waiting.py`: loops in which devices wait for each other.

Without a plan, `_coupling.py`, `_sums.py`, `_masks.py` and `_promotion.py` read from a program what
it does with its examples.

The others show a report: `_summary.py`, `_table.py`, `_html.py` and `_source_page.py`, with the
lines of `_text.py`.
"""
