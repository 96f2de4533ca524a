//! Segments: peers by number, as the C API names them.

use crate::codes;
use crate::refusal::{Answer, Refusal};
use std::collections::HashMap;

/// The engine's own segment.
pub const LOCAL_SEGMENT: i32 = 0;

/// The most names that are numbered.
const SEGMENTS_MAX: usize = 65_536;

/// Names by number. A number is never given to another name.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    names: Vec<String>,
    numbers: HashMap<String, i32>,
}

impl Segments {
    pub(crate) fn number(&mut self, name: &str) -> Answer<i32> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(*number);
        }
        if self.names.len() >= SEGMENTS_MAX {
            return Err(Refusal::new(codes::TOO_MANY, "too many segments were opened"));
        }
        self.names.push(name.to_owned());
        let number = i32::try_from(self.names.len()).expect("at most SEGMENTS_MAX");
        self.numbers.insert(name.to_owned(), number);
        Ok(number)
    }

    pub(crate) fn name(&self, number: i32) -> Option<&str> {
        let at = usize::try_from(number).ok()?.checked_sub(1)?;
        self.names.get(at).map(String::as_str)
    }
}
