"""Convert a GGUF file of a Llama or Qwen2 model into a Hugging Face directory."""
