//! A retention config as bytes, in a format of its own, little endian.
//!
//! | bytes | use |
//! |---|---|
//! | 4 | `KVRC` |
//! | 2 | version |
//! | 1 | transfer mode: 0 `Dram`, 1 `Gds`, 2 `PosixDebugFallback` |
//! | 1, 1, 8 | retention of decoded tokens: priority, 1 if it has a duration, duration in milliseconds or 0 |
//! | 2, … | the directory's length, the directory in UTF-8 |
//! | 2 | number of ranges, in the order of their tokens |
//! | 4, 1, 4 | of each range: start, 1 if it has an end, end or 0 |
//! | 1, 1, 8 | of each range: its retention |
//!
//! A config has one form only: what was decoded and is encoded again is what it was.

use super::{Retention, RetentionConfig, RetentionError, TokenRange, TransferMode};
use std::fmt;

const MAGIC: [u8; 4] = *b"KVRC";
/// The version that is written, and the newest that is read.
pub const FORMAT_VERSION: u16 = 1;

/// Bytes that are not a retention config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes do not begin as a config does.
    NotAConfig,
    /// A newer kvferry wrote it.
    Newer {
        /// The version of the bytes.
        version: u16,
    },
    /// The bytes end too early.
    Truncated {
        /// Number of bytes that were given.
        len_bytes: usize,
    },
    /// Bytes follow that have no meaning.
    Trailing {
        /// Number of bytes that follow.
        len_bytes: usize,
    },
    /// A field has a value without a meaning.
    Malformed {
        /// Name of the field.
        field: &'static str,
    },
    /// The fields contradict each other.
    Invalid(RetentionError),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAConfig => {
                write!(f, "not a retention config: the bytes do not begin with KVRC")
            }
            Self::Newer { version } => write!(
                f,
                "retention config of version {version}, this kvferry reads up to {FORMAT_VERSION}: upgrade it"
            ),
            Self::Truncated { len_bytes } => {
                write!(f, "malformed retention config: truncated after {len_bytes} bytes")
            }
            Self::Trailing { len_bytes } => {
                write!(f, "malformed retention config: {len_bytes} bytes after its end")
            }
            Self::Malformed { field } => write!(f, "malformed retention config: {field}"),
            Self::Invalid(error) => write!(f, "invalid retention config: {error}"),
        }
    }
}

impl std::error::Error for WireError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Invalid(error) => Some(error),
            _ => None,
        }
    }
}

impl From<RetentionError> for WireError {
    fn from(error: RetentionError) -> Self {
        Self::Invalid(error)
    }
}

impl RetentionConfig {
    /// The config's bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let directory = self.directory().unwrap_or_default();
        let mut bytes = Vec::with_capacity(21 + directory.len() + 19 * self.ranges().len());
        bytes.extend(MAGIC);
        bytes.extend(FORMAT_VERSION.to_le_bytes());
        bytes.push(match self.mode() {
            TransferMode::Dram => 0,
            TransferMode::Gds => 1,
            TransferMode::PosixDebugFallback => 2,
        });
        write_retention(&mut bytes, self.decode_retention());
        write_len(&mut bytes, directory.len());
        bytes.extend(directory.as_bytes());
        write_len(&mut bytes, self.ranges().len());
        for range in self.ranges() {
            bytes.extend(range.start.to_le_bytes());
            bytes.push(range.end.is_some().into());
            bytes.extend(range.end.unwrap_or_default().to_le_bytes());
            write_retention(&mut bytes, range.retention);
        }
        bytes
    }

    /// Decodes the output of [`RetentionConfig::to_bytes`]; other bytes are refused.
    pub fn decode_bytes(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.array().ok() != Some(MAGIC) {
            return Err(WireError::NotAConfig);
        }
        match u16::from_le_bytes(reader.array()?) {
            0 => return Err(WireError::Malformed { field: "version 0" }),
            version if version > FORMAT_VERSION => return Err(WireError::Newer { version }),
            _ => {}
        }
        let mode = match reader.byte()? {
            0 => TransferMode::Dram,
            1 => TransferMode::Gds,
            2 => TransferMode::PosixDebugFallback,
            _ => return Err(WireError::Malformed { field: "unknown transfer mode" }),
        };
        let decode = reader.retention()?;
        let len = reader.len()?;
        let directory = std::str::from_utf8(reader.take(len)?)
            .map_err(|_| WireError::Malformed { field: "the directory is not UTF-8" })?;
        let count = reader.len()?;
        if count > super::RANGES_MAX {
            return Err(RetentionError::TooManyRanges { count }.into());
        }
        let ranges = (0..count).map(|_| reader.range()).collect::<Result<Vec<_>, _>>()?;
        if !ranges.is_sorted_by_key(|range| range.start) {
            return Err(WireError::Malformed { field: "ranges are not in order" });
        }
        match bytes.len() - reader.at {
            0 => {}
            len_bytes => return Err(WireError::Trailing { len_bytes }),
        }
        Ok(Self::new(ranges)?.decode(decode)?.transfer(mode, Some(directory))?)
    }
}

fn write_len(bytes: &mut Vec<u8>, len: usize) {
    bytes.extend(u16::try_from(len).expect("checked when the config was made").to_le_bytes());
}

fn write_retention(bytes: &mut Vec<u8>, retention: Retention) {
    bytes.push(retention.priority);
    bytes.push(retention.duration_ms.is_some().into());
    bytes.extend(retention.duration_ms.unwrap_or_default().to_le_bytes());
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], WireError> {
        let truncated = WireError::Truncated { len_bytes: self.bytes.len() };
        let taken = self.bytes.get(self.at..self.at + len).ok_or(truncated)?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        Ok(self.take(N)?.try_into().expect("as many as were taken"))
    }

    fn byte(&mut self) -> Result<u8, WireError> {
        self.array().map(|[byte]| byte)
    }

    fn len(&mut self) -> Result<usize, WireError> {
        Ok(u16::from_le_bytes(self.array()?).into())
    }

    /// A value that is there or not; without it, its bytes are 0.
    fn optional<T>(&mut self, is_there: u8, value: T) -> Result<Option<T>, WireError>
    where
        T: Default + PartialEq,
    {
        match is_there {
            1 => Ok(Some(value)),
            0 if value == T::default() => Ok(None),
            _ => Err(WireError::Malformed { field: "an optional value" }),
        }
    }

    fn retention(&mut self) -> Result<Retention, WireError> {
        let [priority, is_there] = self.array()?;
        let duration = u64::from_le_bytes(self.array()?);
        Ok(Retention { priority, duration_ms: self.optional(is_there, duration)? })
    }

    fn range(&mut self) -> Result<TokenRange, WireError> {
        let start = u32::from_le_bytes(self.array()?);
        let is_there = self.byte()?;
        let end = u32::from_le_bytes(self.array()?);
        let end = self.optional(is_there, end)?;
        Ok(TokenRange { start, end, retention: self.retention()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> RetentionConfig {
        let ranges = [
            TokenRange {
                start: 0,
                end: Some(128),
                retention: Retention { priority: 90, duration_ms: Some(60_000) },
            },
            TokenRange {
                start: 256,
                end: None,
                retention: Retention { priority: 0, duration_ms: None },
            },
        ];
        let decode = Retention { priority: 10, duration_ms: Some(5) };
        let config = RetentionConfig::new(ranges).unwrap().decode(decode).unwrap();
        config.transfer(TransferMode::Gds, Some("kv/ä")).unwrap()
    }

    const GOLDEN: &[u8] = &[
        b'K', b'V', b'R', b'C', 1, 0, // version 1
        1, // Gds
        10, 1, 5, 0, 0, 0, 0, 0, 0, 0, // decode
        5, 0, b'k', b'v', b'/', 0xc3, 0xa4, // directory
        2, 0, // ranges
        0, 0, 0, 0, 1, 128, 0, 0, 0, 90, 1, 0x60, 0xea, 0, 0, 0, 0, 0, 0, //
        0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];

    #[test]
    fn the_bytes_of_a_config_are_these() {
        assert_eq!(example().to_bytes(), GOLDEN);
        assert_eq!(RetentionConfig::decode_bytes(GOLDEN), Ok(example()));
    }

    #[test]
    fn a_newer_version_is_refused_and_named() {
        let mut bytes = GOLDEN.to_vec();
        bytes[4..6].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
        let error = RetentionConfig::decode_bytes(&bytes).unwrap_err();
        assert_eq!(error, WireError::Newer { version: 2 });
        assert!(error.to_string().contains("version 2, this kvferry reads up to 1"));
    }

    #[test]
    fn bytes_that_are_cut_off_or_follow_are_refused() {
        for len in 0..GOLDEN.len() {
            let error = RetentionConfig::decode_bytes(&GOLDEN[..len]).unwrap_err();
            assert!(matches!(error, WireError::NotAConfig | WireError::Truncated { .. }), "{len}");
        }
        let longer = [GOLDEN, &[0]].concat();
        let error = RetentionConfig::decode_bytes(&longer);
        assert_eq!(error, Err(WireError::Trailing { len_bytes: 1 }));
    }

    #[test]
    fn bytes_with_ranges_that_overlap_are_refused_as_the_config_is() {
        let mut bytes = GOLDEN.to_vec();
        bytes[32..34].copy_from_slice(&[0, 2]);
        let error = RetentionConfig::decode_bytes(&bytes).unwrap_err();
        assert!(matches!(error, WireError::Invalid(RetentionError::Overlap { .. })), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_was_decoded_and_encoded_again_is_what_it_was(
            changes in prop::collection::vec((0..GOLDEN.len(), any::<u8>()), 0..4),
        ) {
            let mut bytes = GOLDEN.to_vec();
            changes.into_iter().for_each(|(at, byte)| bytes[at] = byte);
            if let Ok(config) = RetentionConfig::decode_bytes(&bytes) {
                prop_assert_eq!(config.to_bytes(), bytes);
            }
        }

        #[test]
        fn any_config_survives_its_bytes(
            ends in prop::collection::btree_set(any::<u32>(), 0..20),
            priority in 0..=100u8,
            duration_ms in any::<Option<u64>>(),
            directory in any::<Option<String>>(),
        ) {
            let ends: Vec<u32> = ends.into_iter().collect();
            let retention = Retention { priority, duration_ms };
            let range = |pair: &[u32]| TokenRange { start: pair[0], end: pair.get(1).copied(), retention };
            let config = RetentionConfig::new(ends.chunks(2).map(range)).unwrap();
            let config = config.decode(retention).unwrap();
            if let Ok(config) = config.transfer(TransferMode::PosixDebugFallback, directory.as_deref()) {
                prop_assert_eq!(RetentionConfig::decode_bytes(&config.to_bytes()), Ok(config));
            }
        }
    }
}
