//! Plans: what they copy, and what they cost.

mod copies;
mod costs;
mod devices;
mod scatter;
