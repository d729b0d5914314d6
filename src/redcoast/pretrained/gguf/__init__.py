"""Files of llama.cpp: their tensors, dequantised, and their settings as Hugging Face's.

`_file.py` reads the format, and the others say how its names map to those of the families.
"""
