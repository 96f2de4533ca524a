//! The figures, the file they are kept in, and how much each may differ.

use crate::Failure;
use serde_json::{Map, Value};
use std::path::Path;

/// Figures by name, in the order in which they were counted.
#[derive(Clone, Debug, Default)]
pub(crate) struct Figures(Vec<(String, Value)>);

/// Amount by which a figure may exceed the kept one: a share of it, and a number on top.
///
/// Figures that do not depend on the scheduler are exact. The number of calls that move bytes depends on
/// how far the two sides run ahead of each other, and the number of waits even more.
fn tolerance(name: &str) -> (f64, u64) {
    // The acceptor waits now and then: it sets a timer, and watches its socket.
    let waits = name.contains(", acceptor: ");
    match name.rsplit(": ").next().unwrap_or_default() {
        "payload bytes copied" => (0.0, 0),
        "other calls" | "allocations" if waits => (0.0, 2),
        "bytes allocated" if waits => (0.0, 128),
        "other calls" | "allocations" | "bytes allocated" => (0.0, 0),
        "instructions" => (0.01, 0),
        // A block's bytes arrive in parts.
        "wake-ups" if name.contains("I/O threads") => (0.0, 3),
        "wake-ups" => (0.0, 0),
        "bytes copied" => (0.5, 1024),
        "calls that move bytes" => (0.1, 1),
        _ => (1.0, 5),
    }
}

impl Figures {
    pub(crate) fn set(&mut self, name: &str, value: impl Into<Value>) {
        self.0.push((name.to_owned(), value.into()));
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, value)| value)
    }

    pub(crate) fn read(file: &str) -> Result<Self, Failure> {
        let text = std::fs::read_to_string(file)
            .map_err(|e| format!("{file} can't be read ({e}); `--keep` makes it"))?;
        let map: Map<String, Value> = serde_json::from_str(&text)?;
        Ok(Self(map.into_iter().collect()))
    }

    /// Writes one figure per line.
    pub(crate) fn write(&self, file: &str) -> Result<(), Failure> {
        if let Some(dir) = Path::new(file).parent() {
            std::fs::create_dir_all(dir)?;
        }
        let lines: Vec<String> = self
            .0
            .iter()
            .map(|(name, value)| format!("  {}: {value}", Value::from(name.as_str())))
            .collect();
        std::fs::write(file, format!("{{\n{}\n}}\n", lines.join(",\n")))?;
        Ok(())
    }

    /// Prints the differences to the kept figures. Returns whether none got worse.
    pub(crate) fn compare(&self, kept: &Self) -> bool {
        // They decide about instructions.
        let same_tools = self.get("tools") == kept.get("tools");
        let (mut worse, mut better, mut same) = (0, 0, 0);
        for (name, value) in &self.0 {
            let Some(now) = value.as_u64() else { continue };
            if name.ends_with(": instructions") && !same_tools {
                continue;
            }
            let Some(before) = kept.get(name).and_then(Value::as_u64) else {
                println!("new     {name}: {now}");
                continue;
            };
            let (share, more) = tolerance(name);
            let room = (before as f64 * share) as u64 + more;
            if now > before + room {
                worse += 1;
                println!("WORSE   {name}: {now}, was {before}, at most {}", before + room);
            } else if now + room < before {
                better += 1;
                println!("better  {name}: {now}, was {before}");
            } else {
                same += 1;
            }
        }
        for (name, _) in &kept.0 {
            if self.get(name).is_none() {
                println!("gone    {name}: not counted here");
            }
        }
        if !same_tools {
            println!("SKIPPED: instructions: kept with another compiler or valgrind than these");
        }
        println!("{same} figures as kept, {better} better, {worse} worse");
        worse == 0
    }
}
