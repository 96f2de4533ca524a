//! `kvferry version`.

use serde::Serialize;

use crate::failure::Failure;
use crate::output;

#[derive(Debug, Serialize)]
struct Version {
    schema: &'static str,
    version: &'static str,
    target: String,
    debug: bool,
}

pub(crate) fn run(json: bool) -> Result<(), Failure> {
    let version = Version {
        schema: "kvferry.version/1",
        version: env!("CARGO_PKG_VERSION"),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        debug: cfg!(debug_assertions),
    };
    if json {
        output::print_json(&version)?;
    } else {
        output::print(&format!("kvferry {} ({})\n", version.version, version.target))?;
    }
    Ok(())
}
