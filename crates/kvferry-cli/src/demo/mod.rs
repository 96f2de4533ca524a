//! `kvferry demo`: KV cache handed over, and everything verified.
//!
//! `engines/` runs small engines, each a process, on kvferry's connector: a wrong byte is a wrong
//! token. `pools/` (`--without-engines`) moves the caches of named models between two processes, and
//! digests every byte.

pub(crate) mod engines;
pub(crate) mod pools;

use crate::cli::DemoArgs;
use crate::failure::Failure;

pub(crate) fn run(args: &DemoArgs) -> Result<(), Failure> {
    if args.list_models {
        pools::list_models(args)
    } else if args.without_engines {
        pools::run(args)
    } else {
        engines::run(args)
    }
}
