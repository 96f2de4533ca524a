"""SGLang on kvferry: prefill and decode on `mooncake.engine`'s drop-in, and HiCache's storage."""
