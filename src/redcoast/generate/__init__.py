"""Decoding: greedy, sampling and beam search, with a key-value cache."""

from ._generate import generate as generate
