"""The box's wall clock: who sets it, how far off it is, and what brings it right. It never blocks serving."""
