//! Options as keys and values.

use kvferry_store::objects::ObjectTier;
use kvferry_store::{Error, Result};
use std::time::Duration;

/// The tier's own options, with their defaults. Times are in seconds.
///
/// | key | default | meaning |
/// |---|---|---|
/// | `concurrency` | 16 | requests under way at most, in each direction |
/// | `request_timeout` | 10 | of a request with its repetitions |
/// | `retries` | 2 | repetitions of a request that fails |
/// | `priority_min` | 0 | blocks of a lower priority are not uploaded |
/// | `waiting_blocks` | 16384 | blocks that may wait for their upload |
/// | `waiting_bytes` | 4294967296 | their bytes |
/// | `absent_for` | 5 | how long it is remembered that a block is not there |
/// | `close_timeout` | 5 | how long closing the store goes on uploading |
/// | `away_after` | 3 | failures in a row after which no requests are made for a while |
/// | `away_min` | 1 | how long, at first; it doubles each time |
/// | `away_max` | 60 | how long, at most |
pub const OPTIONS: [&str; 11] = [
    "concurrency",
    "request_timeout",
    "retries",
    "priority_min",
    "waiting_blocks",
    "waiting_bytes",
    "absent_for",
    "close_timeout",
    "away_after",
    "away_min",
    "away_max",
];

/// Requests that may be under way at most.
const CONCURRENCY_MAX: usize = 1024;

#[derive(Clone, Debug)]
pub(crate) struct Options {
    concurrency: usize,
    pub(crate) request_timeout: Duration,
    pub(crate) retries: usize,
    priority_min: u8,
    waiting_blocks: usize,
    waiting_bytes: u64,
    absent_for: Duration,
    close_timeout: Duration,
    away_after: u32,
    away_min: Duration,
    away_max: Duration,
    /// Options of the object store; keys are in lower case.
    pub(crate) others: ObjectStoreOptions,
}

/// Options of the object store. Values may be secrets: `Debug` shows keys only.
#[derive(Clone, Default)]
pub(crate) struct ObjectStoreOptions(pub(crate) Vec<(String, String)>);

impl std::fmt::Debug for ObjectStoreOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(key, _)| key)).finish()
    }
}

impl Default for Options {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            concurrency: 16,
            request_timeout: seconds(10),
            retries: 2,
            priority_min: 0,
            waiting_blocks: 16_384,
            waiting_bytes: 4 << 30,
            absent_for: seconds(5),
            close_timeout: seconds(5),
            away_after: 3,
            away_min: seconds(1),
            away_max: seconds(60),
            others: ObjectStoreOptions::default(),
        }
    }
}

impl Options {
    pub(crate) fn parse<K: AsRef<str>, V: AsRef<str>>(given: &[(K, V)]) -> Result<Self> {
        let mut options = Self::default();
        for (key, value) in given {
            options.set(&key.as_ref().to_ascii_lowercase(), value.as_ref())?;
        }
        Ok(options)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "concurrency" => self.concurrency = number(key, value, 1, CONCURRENCY_MAX as u64)?,
            "request_timeout" => self.request_timeout = time(key, value)?,
            "retries" => self.retries = number(key, value, 0, 100)?,
            "priority_min" => self.priority_min = number(key, value, 0, 101)?,
            "waiting_blocks" => self.waiting_blocks = number(key, value, 0, u32::MAX.into())?,
            "waiting_bytes" => self.waiting_bytes = number(key, value, 0, u64::MAX)?,
            "absent_for" => self.absent_for = time(key, value)?,
            "close_timeout" => self.close_timeout = time(key, value)?,
            "away_after" => self.away_after = number(key, value, 1, 1_000_000)?,
            "away_min" => self.away_min = time(key, value)?,
            "away_max" => self.away_max = time(key, value)?,
            _ => self.others.0.push((key.to_owned(), value.to_owned())),
        }
        Ok(())
    }

    pub(crate) fn apply(&self, tier: ObjectTier) -> ObjectTier {
        tier.concurrency(self.concurrency)
            .priority_min(self.priority_min)
            .waiting_max(self.waiting_blocks, self.waiting_bytes)
            .absent_for(self.absent_for)
            .close_timeout(self.close_timeout)
            .away(self.away_after, self.away_min, self.away_max)
    }
}

fn number<T: TryFrom<u64>>(key: &str, value: &str, min: u64, max: u64) -> Result<T> {
    let parsed = value.trim().parse().ok().filter(|it| (min..=max).contains(it));
    parsed.and_then(|it| T::try_from(it).ok()).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "the option {key} is a number from {min} to {max}, got {value:?}"
        ))
    })
}

/// A day at most: what is longer is a mistake.
fn time(key: &str, value: &str) -> Result<Duration> {
    let seconds = value.trim().parse::<f64>().ok().filter(|it| (0.0..=86_400.0).contains(it));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        Error::InvalidArgument(format!(
            "the option {key} is a number of seconds, at most a day, got {value:?}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_own_option_is_known() {
        for key in OPTIONS {
            let options = Options::parse(&[(key.to_uppercase(), "7")]).expect("a number");
            assert!(options.others.0.is_empty(), "{key}");
        }
    }

    #[test]
    fn a_value_that_is_no_number_in_range_is_refused() {
        for wrong in [
            ("concurrency", "0"),
            ("concurrency", "many"),
            ("priority_min", "200"),
            ("request_timeout", "-1"),
            ("away_max", "NaN"),
            ("away_max", "1e9"),
        ] {
            let error = Options::parse(&[wrong]).expect_err("wrong").to_string();
            assert!(error.contains(wrong.0) && error.contains(wrong.1), "{error}");
        }
    }

    #[test]
    fn values_of_other_options_are_not_shown() {
        let options = Options::parse(&[("aws_secret_access_key", "hidden")]).expect("options");
        assert!(!format!("{options:?}").contains("hidden"));
    }
}
