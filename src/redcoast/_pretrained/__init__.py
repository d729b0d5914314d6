"""Published weights to models, and back."""

from .load import load_pretrained as load_pretrained
from .save import save_pretrained as save_pretrained
