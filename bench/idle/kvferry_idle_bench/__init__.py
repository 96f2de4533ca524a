"""Processor time and wake-ups of Python processes with nothing to do."""
