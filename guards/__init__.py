"""Watchdog guards: one process on every box, one guard a thing that it watches. No torch, no aiohttp: 40 MB at most."""
