//! Entry points for fuzzers, behind the feature `fuzzing`; not part of the API.
//!
//! Each function runs one private decoder of the agent on bytes and checks the result.
//! `kvferry-models` lists and runs them.

pub use crate::memory::fuzzing::regions;
pub use crate::transfer::fuzzing::{cut, cutter};

use crate::config::Config;
use crate::memory::RemoteRegion;
use crate::transfer::requests::{RegionsPage, RegionsQuery, StreamFaultNote};
use kvferry_proto::RegionId;
use kvferry_proto::pack::{decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Decodes the description of a region that a peer sent.
pub fn remote_region(bytes: &[u8]) {
    if let Ok(region) = RemoteRegion::from_bytes(bytes) {
        let again = region.to_bytes();
        assert_eq!(RemoteRegion::from_bytes(&again).expect("own output"), region);
        for cut in 0..again.len() {
            assert!(RemoteRegion::from_bytes(&again[..cut]).is_err(), "cut at {cut}");
        }
        let longer = [again.as_slice(), &[0]].concat();
        assert!(RemoteRegion::from_bytes(&longer).is_err(), "trailing bytes after the description");
    }
}

/// Decodes bodies of requests and answers of the control connection.
pub fn service(bytes: &[u8]) {
    round_trip::<RegionsQuery>(bytes);
    round_trip::<RegionsPage>(bytes);
    if let Ok(page) = RegionsPage::parse(bytes, 5) {
        let ids: Vec<u32> = page.regions.iter().map(|region| region.id.0).collect();
        assert!(ids.first().is_none_or(|first| *first > 5) && ids.windows(2).all(|w| w[0] < w[1]));
    }
    round_trip::<StreamFaultNote>(bytes);
}

fn round_trip<T: Serialize + DeserializeOwned>(bytes: &[u8]) {
    if let Ok(value) = decode::<T>(bytes) {
        let once = encode(&value);
        let again: T = decode(&once).expect("own output");
        assert_eq!(encode(&again), once, "decoding and encoding changes nothing");
        assert!(decode::<T>(&[&once[..], &[0]].concat()).is_err(), "trailing bytes after the body");
    }
}

/// Bodies that this agent sends.
pub fn service_bodies(region: &RemoteRegion) -> Vec<Vec<u8>> {
    let next = RemoteRegion { id: RegionId(region.id.0 + 1), ..region.clone() };
    let page = RegionsPage { regions: vec![region.clone(), next], more: true };
    vec![
        encode(&RegionsQuery { after: 70_000 }),
        encode(&page),
        encode(&StreamFaultNote { stream: 3, code: 5, index: 9 }),
    ]
}

/// Parses a configuration in JSON.
pub fn config(bytes: &[u8]) {
    let Ok(json) = std::str::from_utf8(bytes) else { return };
    let Ok(config) = Config::from_json(json) else { return };
    assert!(config.check().is_ok(), "every value of a parsed configuration is in range");
    assert_eq!(Config::from_json(&config.to_json()).expect("own output"), config);
}
