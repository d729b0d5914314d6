"""Files of llama.cpp: their tensors, dequantised, and their settings as Hugging Face's.

`_file.py` reads the format, and the others map its names to the names of the families.
"""
