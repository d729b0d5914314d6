"""A plan as data and as text: shares, tables, reasons, and what a loss does with its examples.

`_data.py` has the data. `_traffic.py`, `_lines.py`, `_repeated.py` and `_reasons.py` make it from a
decision of the solver; `_coupling.py`, `_sums.py`, `_masks.py` and `_promotion.py` make it from the
program. `_summary.py`, `_table.py` and `_html.py` draw it.
"""
