"""The clocks of a site's boxes against the operator's. `box_side` travels to the box: standard library only."""
