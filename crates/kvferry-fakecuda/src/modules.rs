//! Loaded modules.

use std::sync::Arc;

use crate::abi::{Error, Result};
use crate::ptx::Function;

/// A module of PTX text, with a handle for each kernel.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) device: usize,
    pub(crate) functions: Vec<(usize, Arc<Function>)>,
}

impl Module {
    /// The kernel behind a handle, in any module of the list.
    pub(crate) fn function<'a>(
        modules: impl Iterator<Item = &'a Self>,
        handle: usize,
    ) -> Result<(usize, Arc<Function>)> {
        for module in modules {
            for (own, function) in &module.functions {
                if *own == handle {
                    return Ok((module.device, function.clone()));
                }
            }
        }
        Err(Error::INVALID_HANDLE)
    }
}
