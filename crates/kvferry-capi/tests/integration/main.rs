//! The headers, and programs and adapters in C and C++ on the built library.

mod header;
mod kit;
mod programs;
mod rtp_llm;
mod trtllm_loopback;
