"""Memory of the box, its GPUs and the stage: leaks, pressure, and what is done about them."""
