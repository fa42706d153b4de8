"""What docs/make_llama_13b.py computes, and how its page says it."""
