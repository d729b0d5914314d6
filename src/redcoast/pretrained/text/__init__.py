"""Tokenizers and chat templates, which come with the weights of language models.

A chat template is a program. It is rendered in a process of its own, with limits of memory and of
time.
"""

from ._tokenizer_files import load_chat_template as load_chat_template
from ._tokenizer_files import load_tokenizer as load_tokenizer
