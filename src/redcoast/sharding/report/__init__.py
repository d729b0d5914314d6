"""A plan as data and as text: shares, tables, reasons, and what a loss does with its examples.

`_data.py` has the data, also for `json.dumps`. `_reasons.py`, `_repeated.py`, `_traffic.py` and
`_lines.py` make it from a decision of the solver, and `_not_done.py` adds what the mesh asks for in
vain. `_traffic.py` lists what devices send, with what `_sent.py` (functions on the host) and
`_asked.py` (shardings that the program asks for) add. `_update_traffic.py` has the communication of
an optimizer's update. `_coupling.py`, `_sums.py`, `_masks.py`, `_promotion.py` and `_waiting.py`
read the program. The others show a report: `_summary.py`, `_table.py`, `_html.py` and
`_source_page.py`, with the lines of `_text.py`.
"""
