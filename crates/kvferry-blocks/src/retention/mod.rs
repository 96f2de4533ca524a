//! Retention of blocks, and how blocks are offloaded, as a request wishes.
//!
//! The meaning is that of TensorRT-LLM's `KvCacheRetentionConfig`.

mod wire;

pub use wire::{FORMAT_VERSION, WireError};

use std::fmt;
use std::sync::Arc;

/// The highest priority.
pub const PRIORITY_MAX: u8 = 100;
/// The priority of blocks of which a request says nothing.
pub const PRIORITY_DEFAULT: u8 = 35;
/// Ranges of a request, at most.
pub const RANGES_MAX: usize = 1024;
/// Bytes of a directory's path, at most.
pub const DIRECTORY_MAX: usize = 4096;

/// Way in which a block is copied between the pools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TransferMode {
    /// Copies to and from host memory.
    #[default]
    Dram,
    /// Copies to and from a file by GPUDirect Storage.
    Gds,
    /// Copies to and from a file by `read` and `write`.
    PosixDebugFallback,
}

/// Retention of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// 0 to [`PRIORITY_MAX`]. Blocks of a lower priority leave first.
    pub priority: u8,
    /// Milliseconds from when the last sequence lets the block go until its priority is [`PRIORITY_DEFAULT`]. None: for
    /// ever.
    pub duration_ms: Option<u64>,
}

impl Retention {
    /// The default priority, for ever.
    pub const DEFAULT: Self = Self { priority: PRIORITY_DEFAULT, duration_ms: None };
}

impl Default for Retention {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Retention of a range of tokens. A block belongs to the range of its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRange {
    /// The first token.
    pub start: u32,
    /// The token after the last one. None: the range goes to the end of the prompt.
    pub end: Option<u32>,
    /// Retention of the blocks whose first token is in the range.
    pub retention: Retention,
}

/// Retention and transfer mode of a request's blocks. Checked: ranges are in order and disjoint. Cheap to clone.
///
/// ```
/// use kvferry_blocks::{Retention, RetentionConfig, TokenRange, TransferMode};
///
/// let system_prompt = Retention { priority: 90, duration_ms: Some(60_000) };
/// let config = RetentionConfig::new([TokenRange { start: 0, end: Some(128), retention: system_prompt }])?
///     .decode(Retention { priority: 10, duration_ms: None })?
///     .transfer(TransferMode::PosixDebugFallback, Some("kv-files"))?;
/// assert_eq!(RetentionConfig::decode_bytes(&config.to_bytes()), Ok(config));
/// # Ok::<(), kvferry_blocks::RetentionError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionConfig {
    ranges: Arc<[TokenRange]>,
    decode: Retention,
    mode: TransferMode,
    directory: Option<Arc<str>>,
}

impl RetentionConfig {
    /// Ranges may be given in any order. Those that are empty, reversed or overlap, and an open one before others, are
    /// errors. A range that starts behind the prompt has no effect.
    pub fn new(ranges: impl IntoIterator<Item = TokenRange>) -> Result<Self, RetentionError> {
        let mut ranges: Vec<TokenRange> = ranges.into_iter().collect();
        if ranges.len() > RANGES_MAX {
            return Err(RetentionError::TooManyRanges { count: ranges.len() });
        }
        ranges.sort_by_key(|range| range.start);
        for range in &ranges {
            check(range.retention)?;
            if range.end.is_some_and(|end| end <= range.start) {
                return Err(RetentionError::EmptyOrReversed { range: *range });
            }
        }
        for pair in ranges.windows(2) {
            let (first, second) = (pair[0], pair[1]);
            match first.end {
                None => {
                    return Err(RetentionError::OpenBeforeOthers { range: first, next: second });
                }
                Some(end) if end > second.start => {
                    return Err(RetentionError::Overlap { first, second });
                }
                Some(_) => {}
            }
        }
        Ok(Self {
            ranges: ranges.into(),
            decode: Retention::DEFAULT,
            mode: TransferMode::Dram,
            directory: None,
        })
    }

    /// Sets the retention of decoded blocks, whose first token is behind the prompt.
    pub fn decode(self, retention: Retention) -> Result<Self, RetentionError> {
        check(retention)?;
        Ok(Self { decode: retention, ..self })
    }

    /// Sets the transfer mode. A mode that needs files without a directory, or with an empty one, is replaced by
    /// [`TransferMode::Dram`] when the request is allocated, with a [`Warning`].
    pub fn transfer(
        self,
        mode: TransferMode,
        directory: Option<&str>,
    ) -> Result<Self, RetentionError> {
        let directory = directory.filter(|directory| !directory.is_empty());
        if let Some(directory) = directory {
            if directory.len() > DIRECTORY_MAX {
                return Err(RetentionError::DirectoryTooLong { len_bytes: directory.len() });
            }
            if directory.contains('\0') {
                return Err(RetentionError::DirectoryWithNul);
            }
        }
        Ok(Self { mode, directory: directory.map(Arc::from), ..self })
    }

    /// Token ranges in the order of their tokens.
    pub fn ranges(&self) -> &[TokenRange] {
        &self.ranges
    }

    /// Retention of decoded blocks, whose first token is behind the prompt.
    pub fn decode_retention(&self) -> Retention {
        self.decode
    }

    /// Requested transfer mode.
    pub fn mode(&self) -> TransferMode {
        self.mode
    }

    /// Requested directory.
    pub fn directory(&self) -> Option<&str> {
        self.directory.as_deref()
    }

    /// None: no range has this token.
    pub fn at(&self, token: u32) -> Option<Retention> {
        let after = self.ranges.partition_point(|range| range.start <= token);
        let range = self.ranges[..after].last()?;
        range.end.is_none_or(|end| token < end).then_some(range.retention)
    }

    /// The mode that can be carried out, with its directory.
    pub(crate) fn effective(&self, resets: u32) -> (FilePlace, Option<Warning>) {
        let memory = FilePlace { resets, ..FilePlace::default() };
        match (self.mode, &self.directory) {
            (TransferMode::Dram, _) => (memory, None),
            (mode, None) => (memory, Some(Warning::DirectoryMissing { mode })),
            (mode, Some(directory)) => {
                (FilePlace { mode, directory: Some(directory.clone()), resets }, None)
            }
        }
    }
}

impl Default for RetentionConfig {
    fn default() -> Self {
        Self::new([]).expect("no range is wrong")
    }
}

/// Transfer mode of a block, with its directory. Only [`TransferMode::Dram`] has no directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FilePlace {
    pub(crate) mode: TransferMode,
    pub(crate) directory: Option<Arc<str>>,
    /// Resets of the manager before the block was stored.
    pub(crate) resets: u32,
}

fn check(retention: Retention) -> Result<(), RetentionError> {
    match retention.priority {
        0..=PRIORITY_MAX => Ok(()),
        priority => Err(RetentionError::Priority { priority }),
    }
}

/// A wish that was replaced by another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// The mode needs a directory, and the request has none. Its blocks are offloaded to host memory.
    DirectoryMissing {
        /// Requested transfer mode.
        mode: TransferMode,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::DirectoryMissing { mode } = self;
        write!(
            f,
            "transfer mode {mode:?} without a directory: blocks of the request are offloaded to host memory; \
             set the directory of the request's retention config"
        )
    }
}

/// A retention config that can't be meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetentionError {
    /// A priority above [`PRIORITY_MAX`].
    Priority {
        /// The priority that was given.
        priority: u8,
    },
    /// A range ends at or before its start.
    EmptyOrReversed {
        /// The range.
        range: TokenRange,
    },
    /// Two ranges have tokens in common.
    Overlap {
        /// The range that starts first.
        first: TokenRange,
        /// The other one.
        second: TokenRange,
    },
    /// A range without an end is not the last one.
    OpenBeforeOthers {
        /// The range without an end.
        range: TokenRange,
        /// The range after it.
        next: TokenRange,
    },
    /// More than [`RANGES_MAX`].
    TooManyRanges {
        /// Number of ranges that were given.
        count: usize,
    },
    /// More than [`DIRECTORY_MAX`].
    DirectoryTooLong {
        /// The path's length.
        len_bytes: usize,
    },
    /// A path can't contain the byte 0.
    DirectoryWithNul,
}

impl fmt::Display for RetentionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Priority { priority } => {
                write!(f, "retention priority {priority}: it must be between 0 and {PRIORITY_MAX}")
            }
            Self::EmptyOrReversed { range } => {
                write!(f, "token range {}: its end must be after its start", Shown(range))
            }
            Self::Overlap { first, second } => {
                let (first, second) = (Shown(first), Shown(second));
                write!(f, "token ranges {first} and {second} overlap: they must be disjoint")
            }
            Self::OpenBeforeOthers { range, next } => {
                let (range, next) = (Shown(range), Shown(next));
                write!(
                    f,
                    "token range {range} has no end, but {next} is after it: only the last may be open"
                )
            }
            Self::TooManyRanges { count } => {
                write!(f, "{count} token ranges: at most {RANGES_MAX} are supported")
            }
            Self::DirectoryTooLong { len_bytes } => {
                write!(
                    f,
                    "the directory's path has {len_bytes} bytes: at most {DIRECTORY_MAX} are supported"
                )
            }
            Self::DirectoryWithNul => write!(f, "the directory's path contains a zero byte"),
        }
    }
}

impl std::error::Error for RetentionError {}

struct Shown<'a>(&'a TokenRange);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.end {
            Some(end) => write!(f, "{}..{end}", self.0.start),
            None => write!(f, "{}..", self.0.start),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u32, end: Option<u32>) -> TokenRange {
        TokenRange { start, end, retention: Retention::DEFAULT }
    }

    fn worth(priority: u8) -> Retention {
        Retention { priority, duration_ms: None }
    }

    #[test]
    fn disjoint_ranges_are_accepted_in_any_order() {
        let accepted: [&[TokenRange]; 5] = [
            &[],
            &[range(0, Some(64)), range(90, Some(128))],
            &[range(0, None)],
            &[range(50, Some(100)), range(30, Some(40))],
            &[range(30, Some(50)), range(0, Some(30)), range(60, None)],
        ];
        for ranges in accepted {
            let config = RetentionConfig::new(ranges.iter().copied()).unwrap();
            assert!(config.ranges().is_sorted_by_key(|range| range.start));
            assert_eq!(config.ranges().len(), ranges.len());
        }
    }

    #[test]
    fn a_wrong_range_or_priority_is_an_error_that_names_it() {
        let refused: [(&[TokenRange], &str); 7] = [
            (&[range(5, Some(5))], "token range 5..5: its end must be after its start"),
            (&[range(9, Some(5))], "token range 9..5: its end must be after its start"),
            (&[range(0, Some(64)), range(60, Some(80))], "token ranges 0..64 and 60..80 overlap"),
            (
                &[range(64, Some(256)), range(0, Some(128))],
                "token ranges 0..128 and 64..256 overlap",
            ),
            (&[range(0, None), range(30, Some(50))], "token range 0.. has no end, but 30..50"),
            (&[range(3, None), range(3, None)], "token range 3.. has no end, but 3.. is after it"),
            (&[TokenRange { retention: worth(101), ..range(0, None) }], "retention priority 101"),
        ];
        for (ranges, text) in refused {
            let error = RetentionConfig::new(ranges.iter().copied()).unwrap_err().to_string();
            assert!(error.starts_with(text), "{error}");
        }
        let error = RetentionConfig::default().decode(worth(255)).unwrap_err();
        assert_eq!(error, RetentionError::Priority { priority: 255 });
        let many = vec![range(0, None); RANGES_MAX + 1];
        let error = RetentionConfig::new(many).unwrap_err();
        assert_eq!(error, RetentionError::TooManyRanges { count: RANGES_MAX + 1 });
    }

    #[test]
    fn a_token_has_the_retention_of_its_range_or_none() {
        let with =
            |start, end, priority| TokenRange { retention: worth(priority), ..range(start, end) };
        let config =
            RetentionConfig::new([with(16, Some(32), 1), with(32, Some(48), 2), with(64, None, 3)])
                .unwrap();
        let cases =
            [(0, None), (15, None), (16, Some(1)), (31, Some(1)), (32, Some(2)), (47, Some(2))];
        let behind = [(48, None), (63, None), (64, Some(3)), (u32::MAX, Some(3))];
        for (token, priority) in cases.into_iter().chain(behind) {
            assert_eq!(config.at(token), priority.map(worth), "token {token}");
        }
    }

    #[test]
    fn a_directory_that_is_no_path_is_an_error() {
        let transfer = |directory: &str| {
            RetentionConfig::default().transfer(TransferMode::Gds, Some(directory)).map(|_| ())
        };
        assert_eq!(transfer("a\0b"), Err(RetentionError::DirectoryWithNul));
        let len_bytes = DIRECTORY_MAX + 1;
        let long = "x".repeat(len_bytes);
        assert_eq!(transfer(&long), Err(RetentionError::DirectoryTooLong { len_bytes }));
        assert_eq!(transfer(&long[1..]), Ok(()));
    }
}
