"""The decoder family, its linear kernels and the KV cache."""
