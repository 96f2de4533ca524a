"""A stand-in for IPython, which `sglang.utils` imports for notebooks."""
