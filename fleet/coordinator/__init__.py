"""The coordinator: who is there, who is dead, which plan serves, and the two-phase switch between plans."""
