"""Disk, drives, network, power, kernel and logs: one file a thing, each sensing and judging apart."""
