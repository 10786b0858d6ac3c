"""Texts that others wrote, as one line for people: of bounded length, and nothing in it that a terminal obeys."""

from __future__ import annotations


def line(text: str, most: int) -> str:
    """At most `most` characters of a text, each of them printable."""
    text = text[:most]
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)
