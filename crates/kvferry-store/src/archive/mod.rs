//! Blocks of a store as one stream of bytes: [`export`] writes it, and [`import`] puts its blocks into a store.
//!
//! Each record describes and checks itself. A reader of a stream that is damaged or cut finds all other records.
//! `format.rs` documents every byte.

mod exporter;
mod format;
mod importer;
mod reader;
#[cfg(test)]
mod tests;

pub use exporter::{Exported, export};
pub use importer::{Imported, import};
