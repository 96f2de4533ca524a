"""The tests of GPUs, run from programs that were built elsewhere."""
