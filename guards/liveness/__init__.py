"""Programs: which of them hang, are stopped or have been given up, and what is done about it."""
