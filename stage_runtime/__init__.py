"""The process on every stage box: a contiguous range of a model's decoder layers, served on a ring."""
