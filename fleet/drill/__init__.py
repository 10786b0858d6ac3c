"""Rehearsals of failures on a live site. `box_side` travels to the box and knows the standard library only."""
