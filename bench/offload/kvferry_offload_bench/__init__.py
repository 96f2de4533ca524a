"""KV that outlives the engine: `bench/offload/run`."""
