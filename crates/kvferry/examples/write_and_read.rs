//! Writes to the memory of another agent, reads it back, and waits for a notification.
//!
//! Both agents run in one process here. In practice they run on two hosts: the one passes
//! `advertised()` and the bytes of `Region::remote` to the other by any means.

use kvferry::{Access, Agent, Batch, Notification, Options, RemoteRegion, Result};
use std::time::Duration;

const BLOCK: u64 = 64 * 1024;
const BLOCKS: u64 = 16;

pub(crate) fn main() -> Result<()> {
    // The decode side registers memory and lets peers read and write it.
    let decode = Agent::builder().name("decode").start()?;
    let cache = decode.allocate((BLOCK * BLOCKS) as usize, Access::READ_WRITE)?;
    let address = decode.advertised().to_owned();
    let description = cache.remote().to_bytes();

    // The prefill side writes 16 blocks, in reverse order, as one batch.
    let prefill = Agent::builder().name("prefill").start()?;
    let computed = prefill.allocate((BLOCK * BLOCKS) as usize, Access::NONE)?;
    computed.write_at(0, &vec![7; (BLOCK * BLOCKS) as usize])?;
    let remote = RemoteRegion::from_bytes(&description)?;
    let mut blocks = Batch::with_capacity(BLOCKS as usize);
    for block in 0..BLOCKS {
        blocks.push(&computed, block * BLOCK, &remote, (BLOCKS - 1 - block) * BLOCK, BLOCK)?;
    }
    let peer = prefill.peer(&address)?;
    let options = Options {
        timeout: Some(Duration::from_secs(10)),
        notify: Some(Notification::new("request 1", "16 blocks")),
        ..Options::default()
    };
    let written = peer.write(&blocks, &options)?;
    println!("wrote {} bytes in {} blocks", written.bytes, written.descriptors);

    // The notification arrives after all bytes of the batch.
    let note = decode.wait_notification(Duration::from_secs(10))?.expect("sent with the batch");
    assert_eq!((note.name.as_str(), note.from.as_str()), ("request 1", "prefill"));
    let mut bytes = vec![0; cache.len()];
    cache.read_at(0, &mut bytes)?;
    assert!(bytes.iter().all(|byte| *byte == 7));

    // The same batch reads in the other direction.
    computed.write_at(0, &vec![0; computed.len()])?;
    let read = peer.read(&blocks, &Options::default())?;
    computed.read_at(0, &mut bytes)?;
    assert!(read.bytes == BLOCK * BLOCKS && bytes.iter().all(|byte| *byte == 7));
    Ok(())
}
