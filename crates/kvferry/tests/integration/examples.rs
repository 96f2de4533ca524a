//! The programs in `examples/` run and succeed.

#[path = "../../examples/async_transfers.rs"]
mod async_transfers;
#[path = "../../examples/named_region.rs"]
mod named_region;
#[path = "../../examples/write_and_read.rs"]
mod write_and_read;

#[test]
fn the_example_write_and_read_succeeds() {
    write_and_read::main().expect("it succeeds");
}

#[test]
fn the_example_async_transfers_succeeds() {
    async_transfers::main().expect("it succeeds");
}

#[test]
fn the_example_named_region_succeeds() {
    named_region::main().expect("it succeeds");
}
