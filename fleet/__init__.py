"""fleet: provisions, checks and heals LLM inference on a site of edge boxes."""

__version__ = "0.1.0"

# 2026-11-30: no clock is right that says a time before this release was made. Moved with every release.
RELEASED_UNIX_SECONDS = 1_795_996_800
