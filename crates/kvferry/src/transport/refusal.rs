//! Errors that all transports share.

use crate::error::{Error, ErrorKind};
use crate::memory::pieces::MemoryFault;
use crate::transfer::batch::Batch;
use crate::transfer::link::Link;
use kvferry_proto::WireCode;

/// The error of a batch that the peer refused, or that it would refuse.
pub(crate) fn refusal(link: &Link, batch: &Batch, code: WireCode, pair: Option<usize>) -> Error {
    let kind = ErrorKind::from_wire(code);
    let error = Error::new(kind, format!("the peer refused: {code}")).with("peer", &link.address);
    let Some(pair) = pair else { return error };
    let error = error.with("descriptor", pair);
    match (batch.local.pieces.get(pair), batch.remote.get(pair)) {
        (Some(piece), Some(remote)) => error
            .with("region", remote.region)
            .with("offset", format_args!("{:#x}", remote.offset))
            .with("len", piece.len),
        _ => error,
    }
}

/// The error of a batch whose local memory was unregistered or failed during the transfer.
pub fn local_fault(fault: MemoryFault) -> Error {
    let kind = ErrorKind::from_wire(fault.code);
    let error = match fault.device {
        None => Error::new(kind, "local memory of the transfer can't be used any more"),
        Some(e) => Error::new(kind, "a device failed to copy local memory").caused_by(e),
    };
    error.with("descriptor", fault.index)
}
