"""A plan as data and as text: shares, tables, reasons, and what a loss does with its examples."""
