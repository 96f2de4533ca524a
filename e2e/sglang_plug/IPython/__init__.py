"""A stand-in for IPython, which `sglang.utils` imports for notebooks."""
# ruff: noqa: N999 - IPython's name
