"""The floor of the adapters: what `kvferry.vllm`, `kvferry.sglang`, `kvferry.trtllm` and `kvferry.nixl` have in common.

An adapter imports `kvferry`, `kvferry.connector` and this package, and no other adapter. Nothing here imports an
adapter.
"""
