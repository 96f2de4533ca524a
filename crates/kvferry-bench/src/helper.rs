//! Helper processes of a measurement: this program again, with other arguments.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::child::Child;
use crate::failure::Failure;

/// The first argument of a helper process. The program passes the others to [`run`].
///
/// [`run`]: crate::roles::run
pub const COMMAND: &str = "bench-helper";

/// Starts a helper process.
pub(crate) fn spawn(arguments: &[&str]) -> Result<Child, Failure> {
    Child::spawn(&[&[COMMAND], arguments].concat())
}

/// Whether a Python interpreter has a module.
pub(crate) fn imports(python: &Path, module: &str) -> bool {
    let mut probe = Command::new(python);
    probe.args(["-c", &format!("import {module}")]).stdin(Stdio::null());
    let status = probe.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
