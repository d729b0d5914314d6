"""Text generation with a key-value cache: greedy decoding, sampling and beam search."""

from ._generate import generate as generate
