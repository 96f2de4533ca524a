//! Identities that cross the wire.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Random 128-bit id drawn when an agent starts. A restarted agent is a different peer.
///
/// In JSON and other text formats it is written as 32 hexadecimal digits, because numbers of JSON
/// hold 53 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u128);

impl Serialize for Incarnation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_u128(self.0)
        }
    }
}

impl<'de> Deserialize<'de> for Incarnation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            return u128::deserialize(deserializer).map(Self);
        }
        let digits = String::deserialize(deserializer)?;
        match u128::from_str_radix(&digits, 16) {
            Ok(id) if digits.len() == 32 && !digits.starts_with('+') => Ok(Self(id)),
            _ => Err(D::Error::custom("an incarnation has 32 hexadecimal digits")),
        }
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

id!(
    /// A session, unique within the incarnation that accepted it.
    SessionId(u64)
);
id!(
    /// A data stream of a session. Chosen by the initiator, counting up, never used twice.
    StreamId(u32)
);
id!(
    /// A transfer, unique within the session of its initiator.
    TransferId(u64)
);
id!(
    /// A registered region, unique within an incarnation and never reused.
    ///
    /// [`RegionId::ABSOLUTE`] says that an offset is a virtual address to be looked up.
    RegionId(u32)
);

impl RegionId {
    /// Not a region: the offset of the descriptor is a virtual address of the peer's process.
    pub const ABSOLUTE: Self = Self(0);
}
