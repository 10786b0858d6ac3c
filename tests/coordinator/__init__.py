"""Tests of the coordinator: the real one, over real links, with scripted stages."""
