//! Drawing: SVG pictures and pages whose colours follow the reader's light or dark scheme.
//!
//! [`columns`] draws two values per column, [`page`] puts pictures into a page that loads nothing.
//! Within this crate, `chart.rs` draws lines over the size of a block and `dots.rs` latencies.
//!
//! Colours are classes of a style sheet, marks have a text that appears when they are pointed at, and
//! labels keep apart from each other. Plotting libraries write fixed colours and have neither.

pub mod canvas;
pub(crate) mod chart;
pub mod columns;
pub(crate) mod dots;
pub mod page;
mod scale;
pub(crate) mod style;
