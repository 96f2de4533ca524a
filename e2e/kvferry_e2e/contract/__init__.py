"""KVFerryConnector in vLLM's own engine core and schedulers, with a model whose KV can be checked at every position."""
