"""Chooses shardings: candidates are sets of linked dimensions; the cheapest that fit are taken."""
