//! Names of blocks.

/// A block's number in the caller's index, which may use it again for another block later.
pub type Slot = u32;

/// A block's name: of its content and of all before it. Equal keys are the same block.
pub type Key = u64;
