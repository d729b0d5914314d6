"""Decoding: greedy, sampling and beam search, with a key-value cache."""

from .public import generate as generate
