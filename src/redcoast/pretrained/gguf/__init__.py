"""Reads files of llama.cpp: dequantised tensors, and settings in Hugging Face's format."""
