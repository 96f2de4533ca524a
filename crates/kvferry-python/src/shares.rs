//! Room that hosts share.

use kvferry_proto::Origin;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Room for items of peers, which the peers' hosts share: any number of them may be one host's, until others need room.
/// Then the network that has most loses its newest items, and within it the host that has most.
#[pyclass(frozen, module = "kvferry")]
#[derive(Debug)]
pub(crate) struct Shares(Mutex<kvferry_proto::Shares<String>>);

impl Shares {
    fn lock(&self) -> MutexGuard<'_, kvferry_proto::Shares<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Shares {
    /// Room for `room` items.
    #[new]
    fn new(room: usize) -> Self {
        Self(Mutex::new(kvferry_proto::Shares::new(room)))
    }

    /// Adds an item of a host, by the IP address that its connections come from (`Notification.host`). Returns the items
    /// that had to go, which may be this one. Raises `ValueError` if `host` is no IP address. An item that is there
    /// stays as it is.
    fn add(&self, key: String, host: &str) -> PyResult<Vec<String>> {
        let address: IpAddr = host.parse().map_err(|_| {
            PyValueError::new_err(format!("host must be an IP address, not {host:?}"))
        })?;
        let mut shares = self.lock();
        if shares.contains(&key) {
            return Ok(Vec::new());
        }
        shares.add(&key, Origin::from(address), 0, 1);
        let mut gone = Vec::new();
        while let Some(excess) = shares.excess(&key) {
            shares.remove(&excess);
            gone.push(excess);
        }
        Ok(gone)
    }

    /// Removes an item. Nothing happens if there is no such item.
    fn remove(&self, key: &str) {
        self.lock().remove(&key.to_owned());
    }

    fn __len__(&self) -> usize {
        self.lock().len()
    }
}
