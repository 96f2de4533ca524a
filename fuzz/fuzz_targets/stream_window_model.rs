#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvferry_proofs::run("stream_window_model", bytes));
