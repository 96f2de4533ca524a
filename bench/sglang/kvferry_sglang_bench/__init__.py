"""KVFerryStorage beside kvferry's own store and SGLang's file back-end."""
