//! Small bodies in MessagePack: maps with named fields.

use rmp_serde::decode::Error as DecodeError;
use serde::Deserialize;
use serde::Serialize;
use serde::de::{DeserializeOwned, Error, IgnoredAny};
use std::io::ErrorKind;

/// Deepest nesting of the values of unknown fields; ours are five deep at most.
pub(crate) const DEPTH_MAX: usize = 16;

/// Encodes a value with named fields. Earlier versions ignore the fields that later ones add.
///
/// # Panics
/// The value's `Serialize` fails. That of plain data does not.
pub fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("plain values always encode")
}

/// Parses `bytes` as exactly one value.
///
/// # Errors
/// The bytes are malformed, nested too deeply, or followed by others.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    // Reads from the slice without copying names and bytes first.
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(DEPTH_MAX);
    let value = T::deserialize(&mut deserializer)?;
    match IgnoredAny::deserialize(&mut deserializer) {
        Err(DecodeError::InvalidMarkerRead(end)) if end.kind() == ErrorKind::UnexpectedEof => {
            Ok(value)
        }
        _ => Err(DecodeError::custom("bytes after the value")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_behind_a_value_and_deep_nesting_are_refused() {
        let bytes = encode(&(1, "x"));
        assert_eq!(decode::<(u8, String)>(&bytes).expect("own output"), (1, "x".to_owned()));
        // A whole value, and the beginning of one.
        for more in [0xc0, 0xd9] {
            assert!(decode::<(u8, String)>(&[&bytes[..], &[more]].concat()).is_err());
        }
        // An array in an array in an array ...
        let mut deep = vec![0x91; 5000];
        deep.push(0xc0);
        assert!(decode::<serde::de::IgnoredAny>(&deep[4995..]).is_ok());
        assert!(decode::<serde::de::IgnoredAny>(&deep).is_err());
    }
}
