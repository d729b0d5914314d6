"""Files of llama.cpp: their tensors, dequantised, and their settings as Hugging Face's."""
