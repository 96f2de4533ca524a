//! `kvferry version`.

use kvferry_bench::failure::Failure;
use serde::Serialize;

use crate::output;

#[derive(Debug, Serialize)]
struct Version {
    schema: &'static str,
    version: &'static str,
    target: String,
    debug: bool,
}

impl output::Report for Version {
    fn text(&self) -> String {
        format!("kvferry {} ({})\n", self.version, self.target)
    }
}

pub(crate) fn run(json: bool) -> Result<(), Failure> {
    let version = Version {
        schema: "kvferry.version/1",
        version: env!("CARGO_PKG_VERSION"),
        target: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
        debug: cfg!(debug_assertions),
    };
    Ok(output::show(&version, json)?)
}
