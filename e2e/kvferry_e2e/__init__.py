"""End-to-end test: real vLLM, prefill and decode in two processes, moving KV cache through
kvferry's `mooncake.engine`.
"""
