"""Heat: reads every sensor that says how hot the computing parts are, and lowers the stage's limits before the
hardware throttles. No restart is ever needed for it."""
