//! Gives a region a name, and finds it at the peer by this name.
//!
//! Only the peer's address has to be known in advance.

use kvferry::{Access, Agent, Batch, ErrorKind, Options, Result};
use std::time::Duration;

pub(crate) fn main() -> Result<()> {
    let owner = Agent::builder().name("owner").start()?;
    let weights = owner.allocate(4096, Access::READ)?;
    weights.write_at(0, b"layer 0")?;
    owner.name_region(&weights, "weights")?;

    let reader = Agent::builder().name("reader").start()?;
    let peer = reader.peer(owner.advertised())?;
    let remote = peer.region("weights", Duration::from_secs(5))?;
    let copy = reader.allocate(remote.len as usize, Access::NONE)?;
    let mut batch = Batch::new();
    batch.push(&copy, 0, &remote, 0, remote.len)?;
    peer.read(&batch, &Options::default())?;
    let mut bytes = [0; 7];
    copy.read_at(0, &mut bytes)?;
    assert_eq!(&bytes, b"layer 0");

    // The name and the memory are gone once the owner unregisters the region.
    owner.unregister(&weights)?;
    let unknown = peer.region("weights", None).expect_err("unregistered");
    assert_eq!(unknown.kind(), ErrorKind::NotRegistered);
    let refused = peer.read(&batch, &Options::default()).expect_err("unregistered");
    assert_eq!(refused.kind(), ErrorKind::NotRegistered);
    println!("read {:?} from the region \"weights\"", String::from_utf8_lossy(&bytes));
    Ok(())
}
