"""Decoding: greedy, sampling and beam search, with a key-value cache."""

from .generate import generate as generate
