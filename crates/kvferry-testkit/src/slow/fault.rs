//! Errors that a device could have.

/// An error that a device could have. The conformance suite must notice each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceFault {
    /// Completes a copy before its last part, which it copies when the next copy starts.
    EarlyCompletion,
    /// Leaves out one part of a copy that has several.
    LostPiece,
    /// Copies pieces from the device to the stage in the reverse order.
    ReversedPieces,
}

impl DeviceFault {
    /// Every fault.
    pub const ALL: [Self; 3] = [Self::EarlyCompletion, Self::LostPiece, Self::ReversedPieces];

    /// The name of the scenario that must find it.
    pub const fn breaks(self) -> &'static str {
        match self {
            Self::EarlyCompletion => "done_means_all_bytes_are_there",
            Self::LostPiece | Self::ReversedPieces => "scattered_blocks_land_where_they_were_aimed",
        }
    }
}
