//! Description that a rank gives of itself: its layout, its regions, and the address of its agent.

use crate::address::AgentAddress;
use kvferry::{Region, RemoteRegion};
use kvferry_proto::engine_handshake::Model;
use kvferry_proto::layout::Layout;
use kvferry_proto::pack;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A rank's description of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMetadata {
    /// Listening address of the rank's agent.
    pub address: AgentAddress,
    /// Settings that determine what the rank's engine computes; the same on all ranks of an engine.
    pub model: Model,
    /// The layout of the rank's blocks.
    pub layout: Layout,
    /// The regions of the layout, in its order.
    pub regions: Vec<RemoteRegion>,
}

/// Invalid metadata of a rank.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RankMetadataError {
    /// The bytes are malformed.
    #[error("malformed rank metadata: {0}")]
    Malformed(#[from] rmp_serde::decode::Error),
    /// The agent's address is not `host:port`.
    #[error("the agent's address {0:?} is not host:port")]
    Address(String),
    /// The layout is malformed or unsound.
    #[error("invalid layout: {0}")]
    Layout(#[from] kvferry_proto::layout::DecodeError),
    /// The layout has a region that is missing, or has another length.
    #[error("the layout's region {region} of {len} bytes is not among the regions")]
    #[allow(missing_docs, reason = "the fields are in the message")]
    Region { region: kvferry::RegionId, len: u64 },
    /// The description of the model is too long.
    #[error("a model has at most 16 properties, whose names and values have at most 1024 bytes")]
    Model,
}

#[derive(Serialize, Deserialize)]
struct Wire {
    address: AgentAddress,
    #[serde(default, skip_serializing_if = "Model::is_empty")]
    model: Model,
    #[serde(with = "serde_bytes")]
    layout: Vec<u8>,
    regions: Vec<RemoteRegion>,
}

impl RankMetadata {
    /// Describes a rank whose agent peers reach at `address`. The first of `regions` are those of the layout, in its order;
    /// others are not described.
    ///
    /// # Errors
    /// [`RankMetadataError::Address`], [`RankMetadataError::Region`], [`RankMetadataError::Model`].
    pub fn new(
        address: &str,
        model: Model,
        layout: Layout,
        regions: &[Region],
    ) -> Result<Self, RankMetadataError> {
        let regions = regions.iter().take(layout.regions().len()).map(Region::remote).collect();
        let invalid = |_| RankMetadataError::Address(address.to_owned());
        let address = address.parse().map_err(invalid)?;
        Self { address, model, layout, regions }.checked()
    }

    /// Encodes the metadata for the wire.
    pub fn encode(&self) -> Vec<u8> {
        pack::encode(&Wire {
            address: self.address.clone(),
            model: self.model.clone(),
            layout: self.layout.encode(),
            regions: self.regions.clone(),
        })
    }

    /// Decodes and checks metadata. The bytes may be from any peer. Regions that the layout does not have, which earlier
    /// versions may send, are left out.
    ///
    /// # Errors
    /// All of [`RankMetadataError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, RankMetadataError> {
        let Wire { address, model, layout, mut regions } = pack::decode(bytes)?;
        let layout = Layout::decode(&layout)?;
        regions.truncate(layout.regions().len());
        Self { address, model, layout, regions }.checked()
    }

    fn checked(self) -> Result<Self, RankMetadataError> {
        if !self.model.is_sound() {
            return Err(RankMetadataError::Model);
        }
        let regions = self.layout.regions();
        for (at, region) in regions.iter().enumerate() {
            let there = self.regions.get(at);
            if there.is_none_or(|there| there.id != region.id || there.len != region.len) {
                return Err(RankMetadataError::Region { region: region.id, len: region.len });
            }
        }
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry::{Access, Agent};
    use kvferry_models::engines::layout;
    use kvferry_proto::layout::{Heads, Packing, Shape};

    #[test]
    fn i8_metadata_describe_no_regions_that_the_layout_does_not_have() {
        let agent = Agent::builder().listen(([127, 0, 0, 1], 0)).start().expect("an agent");
        let shape = Shape { layers: 1, blocks: 8, heads: 1, rows: 4, content: 8, kernel_blocks: 1 };
        let len = shape.bytes().expect("small");
        let memory = agent.allocate(len as usize, Access::READ).expect("memory");
        let heads = Heads::shard(1, 0, 1).expect("one head");
        let layout = layout(memory.id(), heads, &shape, Packing::Lbhnc);
        let (model, regions) = (Model::default(), [memory.clone(), memory]);
        let mut metadata =
            RankMetadata::new(agent.advertised(), model, layout, &regions).expect("its region");
        assert_eq!(metadata.regions.len(), 1);
        assert_eq!(RankMetadata::decode(&metadata.encode()).expect("sound"), metadata);
        metadata.regions.extend_from_within(..);
        let decoded = RankMetadata::decode(&metadata.encode()).expect("sound");
        assert_eq!(decoded.regions.len(), 1);
    }
}
