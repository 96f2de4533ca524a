//! Output: results to standard output, everything else to standard error.

use kvferry_sys::sync::Mutex;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Prints a result. A reader that closes early (`| head`) ends the output, not the command: the exit
/// code stays the same.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// The result of a command: JSON for programs, text for people.
pub(crate) trait Report: Serialize {
    fn text(&self) -> String;
}

/// Prints a report in one of its two forms.
pub(crate) fn show(report: &impl Report, as_json: bool) -> io::Result<()> {
    print(&if as_json { json(report)? } else { report.text() })
}

pub(crate) fn json<T: Serialize>(value: &T) -> io::Result<String> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    Ok(text)
}

/// A remark on standard error, which may be closed.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Time between lines of progress where no bar can be drawn.
const TELL_EVERY: Duration = Duration::from_secs(15);

/// A bar that counts bytes. Hidden if `quiet`; a line every [`TELL_EVERY`] if standard error is no terminal.
pub(crate) fn byte_bar(quiet: bool, total_bytes: u64) -> ProgressBar {
    bar(quiet, total_bytes, "{bar:32.cyan/blue} {elapsed:>4}  {msg}")
}

/// A bar that counts steps, whose number the work adds to its length. Shown as [`byte_bar`].
pub(crate) fn step_bar(quiet: bool) -> ProgressBar {
    bar(quiet, 0, "{bar:32.cyan/blue} {pos:>4}/{len:4} {elapsed:>4}  {msg}")
}

fn bar(quiet: bool, total: u64, template: &str) -> ProgressBar {
    let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let style = ProgressStyle::with_template(template).expect("the templates here are well formed");
    let bar = ProgressBar::with_draw_target(Some(total), target);
    let bar = bar.with_style(style.progress_chars("━╸─"));
    *SHOWN.lock() = Some(bar.clone());
    if !quiet && !io::stderr().is_terminal() {
        tell(bar.clone());
    }
    bar
}

fn tell(bar: ProgressBar) {
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(TELL_EVERY);
            if bar.is_finished() {
                return;
            }
            note(&format!("[{:>4} s] {}", bar.elapsed().as_secs(), bar.message()));
        }
    });
}

/// The bar on the terminal, if there is one.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Folder of this process that is of no use after its end.
static TEMPORARY: Mutex<Option<PathBuf>> = Mutex::new(None);

/// Has SIGINT and SIGTERM remove this folder, too.
pub(crate) fn remove_when_interrupted(folder: &Path) {
    *TEMPORARY.lock() = Some(folder.to_path_buf());
}

/// Removes the folder. Helper processes may still make files in it.
fn remove_temporary() {
    let folder = TEMPORARY.lock().take();
    let Some(folder) = folder else { return };
    let is_gone = || fs::remove_dir_all(&folder).is_ok();
    let _ = (0..10).any(|_| is_gone());
}

/// Has SIGINT and SIGTERM clear the bar before they end the process, with the exit status that its parent
/// expects. Helper processes end with it.
pub(crate) fn clear_when_interrupted() -> io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        for signal in &mut signals {
            let shown = SHOWN.lock();
            shown.iter().for_each(ProgressBar::finish_and_clear);
            remove_temporary();
            // The lock is held, so no bar is drawn any more.
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(())
}
