"""KVFerryConnector beside the connectors that vLLM has: `bench/vllm/run`."""
