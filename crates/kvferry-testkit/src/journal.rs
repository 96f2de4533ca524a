//! Log lines of the code under test.

use kvferry_sys::sync::Mutex;
use std::fmt::{Debug, Write};
use std::sync::Arc;
use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

/// Keeps log lines, each with its target and its fields, where it is set as the subscriber: for the process
/// (`tracing::subscriber::set_global_default`) or for a thread (`tracing::subscriber::with_default`). Clones share
/// their lines.
#[derive(Clone, Debug)]
pub struct Journal {
    target: &'static str,
    level: Level,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Journal {
    /// Keeps lines whose targets begin with `target`, of this level or of a more severe one.
    pub fn new(target: &'static str, level: Level) -> Self {
        Self { target, level, lines: Arc::default() }
    }

    /// Takes all lines.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.lines.lock())
    }

    /// Takes the lines with this text.
    pub fn take_with(&self, text: &str) -> Vec<String> {
        self.lines.lock().extract_if(.., |line| line.contains(text)).collect()
    }

    /// Whether a line that was not taken has all these texts.
    pub fn has(&self, texts: &[&str]) -> bool {
        self.lines.lock().iter().any(|line| texts.iter().all(|text| line.contains(text)))
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{field}={value:?} ").expect("a string takes it");
    }
}

impl Subscriber for Journal {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with(self.target) && *metadata.level() <= self.level
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(format!("{} ", event.metadata().target()));
        event.record(&mut line);
        self.lines.lock().push(line.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
