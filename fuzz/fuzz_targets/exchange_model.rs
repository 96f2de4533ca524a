#![no_main]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvferry_models::run("exchange_model", bytes));
