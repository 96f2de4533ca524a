//! Configuration of a manager, and the errors of its calls.

use crate::events::Event;
use crate::retention::PRIORITY_MAX;
use crate::tree::Node;
use std::fmt;

/// Bytes that a manager keeps of a block besides its node, at most: numbers in lists, places in queues.
const LISTS_BYTES: usize = 128;

/// The pools of one group of layers, or of one attention window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupConfig {
    /// Pages of the engine.
    pub primary_blocks: u32,
    /// Blocks in host memory, or files. 0: nothing is offloaded.
    pub secondary_blocks: u32,
}

/// Configuration of a [`BlockManager`](crate::BlockManager).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Tokens of a block, the same in all groups.
    pub tokens_per_block: u32,
    /// A sequence has as many blocks in each group.
    pub groups: Vec<GroupConfig>,
    /// Events that are kept until the caller takes them.
    pub events: usize,
    /// Blocks of a lower priority are removed instead of offloaded.
    pub secondary_offload_min_priority: u8,
    /// Whether blocks are reused of which only the first tokens are wanted. Keeps the tokens of stored blocks: four
    /// bytes each.
    pub partial_reuse: bool,
    /// Whether such a block is copied where it can't be taken over, because it is in use or others follow it.
    pub copy_on_partial_reuse: bool,
    /// Blocks of a group whose retention ends in one call, at most, besides two for each block that the call takes or
    /// releases; and as many whose prefix was removed. The others follow in later calls, so that no call takes long.
    pub background_per_call: u32,
}

impl Config {
    /// Sets all other fields to TensorRT-LLM's defaults.
    pub fn new(tokens_per_block: u32, groups: impl Into<Vec<GroupConfig>>) -> Self {
        Self {
            tokens_per_block,
            groups: groups.into(),
            events: 1024,
            secondary_offload_min_priority: 30,
            partial_reuse: true,
            copy_on_partial_reuse: true,
            background_per_call: 8,
        }
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let wrong = |text: String| Err(Error::Config(text));
        if self.tokens_per_block == 0 {
            return wrong("tokens_per_block is 0: a block has at least one token".into());
        }
        if self.groups.is_empty() || self.groups.len() > usize::from(u16::MAX) {
            return wrong(format!("{} groups: 1 to {} are supported", self.groups.len(), u16::MAX));
        }
        if self.secondary_offload_min_priority > PRIORITY_MAX {
            let given = self.secondary_offload_min_priority;
            return wrong(format!(
                "secondary_offload_min_priority is {given}: at most {PRIORITY_MAX}"
            ));
        }
        for (at, group) in self.groups.iter().enumerate() {
            let blocks = u64::from(group.primary_blocks) + u64::from(group.secondary_blocks);
            if group.primary_blocks == 0 {
                return wrong(format!("group {at} has no primary blocks"));
            }
            if blocks > u64::from(u32::MAX / 2) {
                return wrong(format!(
                    "group {at} has {blocks} blocks: at most {} are supported",
                    u32::MAX / 2
                ));
            }
        }
        self.check_memory()
    }

    /// All arrays of a manager are made with it. Memory for them that the system refuses must not end the process.
    fn check_memory(&self) -> Result<(), Error> {
        let blocks = |group: &GroupConfig| {
            u128::from(group.primary_blocks) + u128::from(group.secondary_blocks)
        };
        let all: u128 = self.groups.iter().map(blocks).sum();
        let with_tokens = if self.partial_reuse { blocks(&self.groups[0]) } else { 0 };
        let bytes = all * (size_of::<Node>() + LISTS_BYTES) as u128
            + with_tokens * u128::from(self.tokens_per_block) * size_of::<u32>() as u128
            + self.events as u128 * size_of::<Event>() as u128;
        match usize::try_from(bytes).map(|bytes| Vec::<u8>::new().try_reserve_exact(bytes)) {
            Ok(Ok(())) => Ok(()),
            _ => Err(Error::Config(format!(
                "{all} blocks of {} tokens and {} events need {bytes} bytes of memory, which the system does not give",
                self.tokens_per_block, self.events
            ))),
        }
    }
}

/// A call that can't be carried out. It has changed nothing, unless its variant says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The text says what is wrong.
    Config(String),
    /// A request whose parts don't fit each other; the text says which.
    Request(String),
    /// Too few blocks are free or evictable. Try again when sequences or transfers have ended.
    OutOfBlocks {
        /// Index of the group.
        group: u16,
        /// Primary blocks that the call needs.
        needed: u32,
        /// Primary blocks that are free or can be evicted.
        available: u32,
    },
    /// Blocks can be evicted when transfers of blocks behind them have ended. Other blocks have been evicted. Try again
    /// after the next [`BlockManager::finished`](crate::BlockManager::finished).
    AwaitTransfers {
        /// Index of the group.
        group: u16,
    },
    /// The sequence was freed, or is of another manager.
    UnknownSequence,
    /// The pin has ended, or is of another manager.
    UnknownPin,
    /// The transfer has ended, or is of another manager.
    UnknownTransfer,
    /// The sequence waits for transfers.
    NotReady {
        /// Transfers that the sequence waits for.
        transfers: u32,
    },
    /// Stored blocks can't be forgotten while they are used.
    InUse {
        /// Sequences that are open.
        sequences: usize,
        /// Pins that are open.
        pins: usize,
    },
    /// A key differs from that of the sequence's stored block.
    KeyMismatch {
        /// Index of the block in the sequence.
        block: u32,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(text) => write!(f, "block manager: {text}"),
            Self::Request(text) => write!(f, "{text}"),
            Self::OutOfBlocks { group, needed, available } => write!(
                f,
                "group {group} is out of blocks: {needed} needed, {available} free or evictable; \
                 free or preempt a sequence, or wait for transfers"
            ),
            Self::AwaitTransfers { group } => write!(
                f,
                "group {group} is out of blocks until transfers have ended: try again after the next one"
            ),
            Self::UnknownSequence => {
                write!(f, "unknown sequence: it was freed, or is of another manager")
            }
            Self::UnknownPin => write!(f, "unknown pin: it has ended, or is of another manager"),
            Self::UnknownTransfer => {
                write!(f, "unknown transfer: it has ended, or is of another manager")
            }
            Self::NotReady { transfers } => {
                write!(f, "the sequence waits for {transfers} transfers: wait until it is ready")
            }
            Self::InUse { sequences, pins } => write!(
                f,
                "{sequences} sequences and {pins} pins are open: free and unpin them before a reset"
            ),
            Self::KeyMismatch { block } => write!(
                f,
                "the key of block {block} differs from that of the sequence's stored block: \
                 keys are those of the sequence from its first block on"
            ),
        }
    }
}

impl std::error::Error for Error {}
