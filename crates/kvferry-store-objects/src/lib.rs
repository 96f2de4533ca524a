//! The object tier's object stores: S3, Google Cloud Storage, Azure, and directories.
//!
//! [`open`] takes a URL and options, and gives what
//! [`StoreOptions::objects`](kvferry_store::StoreOptions::objects) needs. [`Bucket`] is the object store by itself.
//!
//! Requests run on a runtime of their own, of two threads, which is started with the first [`Bucket`] call and
//! ends with the bucket. A process that opens no bucket has no such threads.
//!
//! ```
//! use kvferry::Agent;
//! use kvferry_store::{Store, StoreOptions};
//!
//! # let folder = std::env::temp_dir().join(format!("kvferry-objects-doc-{}", std::process::id()));
//! let url = format!("file://{}/bucket", folder.display());
//! let tier = kvferry_store_objects::open(&url, &[("priority_min", "20")])?;
//! let agent = Agent::builder().name("offload").start()?;
//! let options = StoreOptions::new(folder.join("kv"), 64 << 20).objects(tier);
//! let store = Store::open(&agent, &options)?;
//! # store.close();
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod bucket;
mod connect;
mod directory;
mod fault;
#[cfg(test)]
mod faulty;
mod options;
#[cfg(test)]
mod tests;

pub use bucket::Bucket;
pub use options::OPTIONS;

use kvferry_store::Result;
use kvferry_store::objects::ObjectTier;
use options::Options;
use std::sync::Arc;

/// An object store, and how a store uses it.
///
/// `url` is one of
/// - `s3://bucket/prefix`, with the environment's `AWS_*`;
/// - `gs://bucket/prefix`, with `GOOGLE_*`;
/// - `az://container/prefix`, with `AZURE_*`;
/// - `file:///directory`.
///
/// `options` are [`OPTIONS`], and those of the object store, which override the environment: the names of its
/// variables in small letters, such as `aws_endpoint_url`, with or without `aws_`.
///
/// # Errors
/// `InvalidArgument` for a URL or an option that can't be used, `Objects` for credentials that are missing, or a
/// directory that can't be made. Whether the object store answers is not asked here.
pub fn open<K: AsRef<str>, V: AsRef<str>>(url: &str, options: &[(K, V)]) -> Result<ObjectTier> {
    let options = Options::parse(options)?;
    let bucket = connect::connect(url, &options)?;
    Ok(options.apply(ObjectTier::new(Arc::new(bucket))))
}
