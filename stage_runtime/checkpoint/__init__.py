"""Reading a model directory of the bundle: only own shards, verified before use, mapped instead of copied."""
