"""Weights in: a GGUF file of Llama's or Qwen2's architecture becomes a Hugging Face directory."""
