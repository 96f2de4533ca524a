"""`KVFerryStorage` in SGLang's factory, with its configuration, its fault injector and its host pools: a process of its
own in SGLang's environment, `python -m kvferry_e2e.sglang.hicache MODELS REPORT`.
"""
