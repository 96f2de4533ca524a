"""What an engine's scheduler waits for."""
