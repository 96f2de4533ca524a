//! The calls of a [`Space`](crate::Space).

pub(crate) mod get;
pub(crate) mod pin;
pub(crate) mod prefetch;
pub(crate) mod put;
pub(crate) mod single_flight;
pub(crate) mod writing;
