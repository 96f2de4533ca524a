//! What a rank says of itself: how its blocks lie, and where its agent listens.

use kvferry::{Region, RemoteRegion};
use kvferry_proto::layout::Layout;
use kvferry_proto::pack;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A rank's card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankCard {
    /// Where its agent listens, `host:port`.
    pub address: String,
    /// How its blocks lie.
    pub layout: Layout,
    /// The regions of the layout, in its order.
    pub regions: Vec<RemoteRegion>,
}

/// A card that is none.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CardError {
    /// The bytes are something else.
    #[error("its card cannot be read: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// Its layout is not sound.
    #[error("its layout cannot be read: {0}")]
    Layout(#[from] kvferry_proto::layout::DecodeError),
    /// Its regions are not those of its layout.
    #[error("its layout has a region {region} of {len} bytes, which is not among its regions")]
    Region {
        /// Which.
        region: kvferry::RegionId,
        /// How long it should be.
        len: u64,
    },
}

#[derive(Serialize, Deserialize)]
struct Wire {
    address: String,
    #[serde(with = "serde_bytes")]
    layout: Vec<u8>,
    regions: Vec<RemoteRegion>,
}

impl RankCard {
    /// The card of a rank whose agent is known at `address`.
    ///
    /// # Errors
    /// [`CardError::Region`].
    pub fn new(address: String, layout: Layout, regions: &[Region]) -> Result<Self, CardError> {
        let regions = regions.iter().map(Region::remote).collect();
        Self { address, layout, regions }.checked()
    }

    /// The card as it crosses the wire.
    pub fn encode(&self) -> Vec<u8> {
        pack::encode(&Wire {
            address: self.address.clone(),
            layout: self.layout.encode(),
            regions: self.regions.clone(),
        })
    }

    /// The card in bytes that may come from anybody.
    ///
    /// # Errors
    /// All of [`CardError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, CardError> {
        let Wire { address, layout, regions } = pack::decode(bytes)?;
        Self { address, layout: Layout::decode(&layout)?, regions }.checked()
    }

    fn checked(self) -> Result<Self, CardError> {
        let regions = self.layout.regions();
        for (at, region) in regions.iter().enumerate() {
            let there = self.regions.get(at);
            if there.is_none_or(|there| there.id != region.id || there.len != region.len) {
                return Err(CardError::Region { region: region.id, len: region.len });
            }
        }
        Ok(self)
    }
}
