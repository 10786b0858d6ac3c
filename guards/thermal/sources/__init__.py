"""One file a source of temperatures, clocks and throttle flags, each a `guards.thermal.readings.Source`."""
