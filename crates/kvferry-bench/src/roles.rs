//! The roles of a helper process: the other side of each measurement.

use std::path::Path;

use crate::failure::Failure;
use crate::helper::COMMAND;
use crate::{gpu, handoffs, idle, store, transfers};

/// Serves the parent process until it closes this process's standard input.
///
/// # Errors
/// [`Failure::Usage`] for arguments that no measurement passes; otherwise the failure of the helper.
pub fn run(arguments: &[String]) -> Result<(), Failure> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| {
        text.parse::<usize>()
            .map_err(|_| Failure::Usage(format!("{COMMAND}: `{text}` is not a number")))
    };
    let device = |text: &str| {
        i32::try_from(number(text)?).map_err(|error| Failure::Usage(error.to_string()))
    };
    match words.as_slice() {
        ["target"] => transfers::target::run_child(None),
        ["target", core] => transfers::target::run_child(Some(number(core)?)),
        ["memory", bytes] => transfers::baseline::hold(number(bytes)?),
        ["agents", count] => transfers::sessions::run_agents(number(count)?),
        ["gpu-target", gpu, bytes] => gpu::target::run_child(device(gpu)?, number(bytes)?),
        ["gpu-first", gpu] => gpu::first::run_child(device(gpu)?),
        ["gpu-pin", gpu] => gpu::stalls::run_child(device(gpu)?),
        ["producer"] => handoffs::producer::run(),
        ["prefill"] => handoffs::engines::run_prefill(),
        ["idle", "store", folder] => idle::run_store(Path::new(folder)),
        ["idle", "connector"] => handoffs::idle::run(),
        ["idle", "agent", transport] => transfers::sessions::run_idle(transport),
        ["events"] => store::events::run_writer(),
        _ => Err(Failure::Usage(format!("{COMMAND}: no such helper: {}", arguments.join(" ")))),
    }
}
