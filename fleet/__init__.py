"""fleet: provisions, checks and heals LLM inference on a site of edge boxes."""

__version__ = "0.1.0"
