"""Two builds of the command, beside each other."""
