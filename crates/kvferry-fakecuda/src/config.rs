//! The configuration: `key=value` pairs of the environment variable `FAKECUDA`, changed at run
//! time by `fakecuda_set`.

use crate::abi::{Error, Result};

/// All settings. [`Config::set`] states their keys and units.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    pub(crate) devices: usize,
    /// The driver's version as `cuDriverGetVersion` states it, 12080 for 12.8.
    pub(crate) version: i32,
    pub(crate) seed: u64,
    /// Bytes that allocations of one device may take, beside the charge of a context.
    pub(crate) memory: u64,
    /// Bytes that a primary context takes of its device.
    pub(crate) context_charge: u64,
    /// Upper bound of the real delay, in µs, before an operation starts.
    pub(crate) delay_us: u64,
    /// The real pause, in µs, between two steps of an operation.
    pub(crate) step_us: u64,
    /// The factor of the times of a stream that the fault `stream_slow` has struck.
    pub(crate) slow_times: u64,
    /// The error of a device that the fault `device_removed` has struck.
    pub(crate) removed_code: i32,
    /// The devices' compute mode, as the driver numbers it: 0 is shared, 3 is one process at a time.
    pub(crate) compute_mode: i32,
    /// Bits `1 << a * 8 + b`: device ordinal a reaches device ordinal b.
    pub(crate) peers: u64,
    /// The most bytes of one host registration.
    pub(crate) pin_limit: u64,
    /// The most bytes of host memory registered at a time.
    pub(crate) pin_total: u64,
    /// The most IPC mappings at a time.
    pub(crate) ipc_limit: u64,
    /// The most mappings that one dma-buf spans.
    pub(crate) dmabuf_chunks: u64,
    /// The chance, in percent, that an allocation takes the address of a freed one.
    pub(crate) reuse: u8,
    /// All host threads share one vector clock.
    pub(crate) joined_hosts: bool,
    pub(crate) race_checks: bool,
    /// Operations carry the backtrace of the call that submitted them.
    pub(crate) stacks: bool,
    /// A batch copy into a capturing stream is dropped with success, and otherwise refused.
    pub(crate) capture_drops: bool,
    /// `cuGetProcAddress` answers success with a null pointer for an absent symbol.
    pub(crate) missing_succeeds: bool,
    /// Symbols that `cuGetProcAddress` denies, by their base names.
    pub(crate) hidden: Vec<String>,
    /// Time at which the source of a copy in any order is read; seeded without it.
    pub(crate) any_order: AnyOrder,
    /// The entry at which the fault `batch_entry` ends a batch; seeded without it.
    pub(crate) fail_index: Option<u64>,
    pub(crate) rates: Rates,
}

/// Time at which the source of a copy with the order ANY is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnyOrder {
    Seeded,
    Call,
    Between,
    Execution,
}

/// The rate model. Rates are GB/s, equal to bytes per virtual ns; times are virtual ns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rates {
    pub(crate) h2d: f64,
    pub(crate) d2h: f64,
    pub(crate) d2d: f64,
    /// Copy engines, for entries shorter than `cliff` bytes.
    pub(crate) small: f64,
    pub(crate) cliff: u64,
    pub(crate) kernel: f64,
    /// Kernels that touch mapped host memory.
    pub(crate) kernel_host: f64,
    pub(crate) op_ns: u64,
    pub(crate) entry_ns: u64,
    pub(crate) launch_ns: u64,
    pub(crate) call_ns: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: 2,
            version: 12080,
            seed: 1,
            memory: 1 << 30,
            context_charge: 500_000_000,
            delay_us: 20,
            step_us: 0,
            slow_times: 100,
            removed_code: 46,
            compute_mode: 0,
            peers: u64::MAX,
            pin_limit: 512 << 30,
            pin_total: u64::MAX,
            ipc_limit: u64::MAX,
            dmabuf_chunks: 64,
            reuse: 50,
            joined_hosts: true,
            race_checks: true,
            stacks: false,
            capture_drops: true,
            missing_succeeds: false,
            hidden: Vec::new(),
            any_order: AnyOrder::Seeded,
            fail_index: None,
            rates: Rates::default(),
        }
    }
}

impl Default for Rates {
    fn default() -> Self {
        Self {
            h2d: 50.0,
            d2h: 50.0,
            d2d: 87.0,
            small: 6.5,
            cliff: 24 << 10,
            kernel: 1600.0,
            kernel_host: 28.0,
            op_ns: 1500,
            entry_ns: 20,
            launch_ns: 3000,
            call_ns: 500,
        }
    }
}

impl Config {
    /// The defaults with the pairs of `text`, which blanks, commas or semicolons separate, and
    /// the keys that are not settings, with their values. A malformed pair is an error.
    pub(crate) fn parse(text: &str) -> std::result::Result<(Self, Vec<(String, String)>), String> {
        let mut config = Self::default();
        let mut others = Vec::new();
        for pair in text.split([' ', ',', ';', '\n']).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or(format!("`{pair}` has no `=`"))?;
            match config.set(key, value) {
                Ok(()) => {}
                Err(Error::NOT_FOUND) => others.push((key.to_owned(), value.to_owned())),
                Err(_) => return Err(format!("`{value}` is no value of `{key}`")),
            }
        }
        Ok((config, others))
    }

    /// Changes one setting. `NOT_FOUND`: no such key; `INVALID_VALUE`: no such value.
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result {
        let rates = &mut self.rates;
        match key {
            "devices" => self.devices = number::<usize>(value).map(|n| n.min(8))?,
            "version" => self.version = version(value)?,
            "seed" => self.seed = number(value)?,
            "memory" => self.memory = bytes(value)?,
            "context_charge" => self.context_charge = bytes(value)?,
            "delay_us" => self.delay_us = number(value)?,
            "step_us" => self.step_us = number(value)?,
            "slow_times" => self.slow_times = number(value)?,
            "compute_mode" => self.compute_mode = number(value)?,
            "removed_code" => self.removed_code = number(value)?,
            "peers" => self.peers = peers(value)?,
            "pin_limit" => self.pin_limit = bytes(value)?,
            "pin_total" => self.pin_total = bytes(value)?,
            "ipc_limit" => self.ipc_limit = number(value)?,
            "dmabuf_chunks" => self.dmabuf_chunks = number(value)?,
            "reuse" => self.reuse = number(value)?,
            "hosts" => self.joined_hosts = choice(value, "joined", "separate")?,
            "races" => self.race_checks = choice(value, "on", "off")?,
            "stacks" => self.stacks = choice(value, "on", "off")?,
            "capture_batch" => self.capture_drops = choice(value, "drop", "refuse")?,
            "missing" => self.missing_succeeds = choice(value, "success", "not_found")?,
            "hide" => self.hidden.push(value.to_owned()),
            "show" => self.hidden.retain(|hidden| hidden != value),
            "any_order" => {
                self.any_order = match value {
                    "seeded" => AnyOrder::Seeded,
                    "call" => AnyOrder::Call,
                    "between" => AnyOrder::Between,
                    "execution" => AnyOrder::Execution,
                    _ => return Err(Error::INVALID_VALUE),
                }
            }
            "fail_index" => self.fail_index = Some(number(value)?),
            "h2d_gbps" => rates.h2d = rate(value)?,
            "d2h_gbps" => rates.d2h = rate(value)?,
            "d2d_gbps" => rates.d2d = rate(value)?,
            "small_gbps" => rates.small = rate(value)?,
            "cliff" => rates.cliff = bytes(value)?,
            "kernel_gbps" => rates.kernel = rate(value)?,
            "kernel_host_gbps" => rates.kernel_host = rate(value)?,
            "op_ns" => rates.op_ns = number(value)?,
            "entry_ns" => rates.entry_ns = number(value)?,
            "launch_ns" => rates.launch_ns = number(value)?,
            "call_ns" => rates.call_ns = number(value)?,
            _ => return Err(Error::NOT_FOUND),
        }
        Ok(())
    }

    /// Whether device ordinals `a` and `b` reach each other's memory.
    pub(crate) fn peer(&self, a: usize, b: usize) -> bool {
        a == b || self.peers >> (a * 8 + b) & 1 == 1
    }
}

fn number<T: std::str::FromStr>(value: &str) -> Result<T> {
    value.parse().map_err(|_| Error::INVALID_VALUE)
}

fn rate(value: &str) -> Result<f64> {
    let rate: f64 = number(value)?;
    if rate > 0.0 { Ok(rate) } else { Err(Error::INVALID_VALUE) }
}

fn choice(value: &str, yes: &str, no: &str) -> Result<bool> {
    match value {
        v if v == yes => Ok(true),
        v if v == no => Ok(false),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// A count of bytes with an optional suffix KiB, MiB or GiB.
fn bytes(value: &str) -> Result<u64> {
    let units = [("KiB", 10), ("MiB", 20), ("GiB", 30)];
    for (suffix, shift) in units {
        if let Some(digits) = value.strip_suffix(suffix) {
            let count: u64 = number(digits)?;
            return count.checked_mul(1 << shift).ok_or(Error::INVALID_VALUE);
        }
    }
    number(value)
}

/// One of the five version profiles.
fn version(value: &str) -> Result<i32> {
    match value {
        "11.4" => Ok(11040),
        "12.2" => Ok(12020),
        "12.8" => Ok(12080),
        "13.0" => Ok(13000),
        "13.2" => Ok(13020),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// `all`, `none`, or pairs such as `0-1+1-0`, each the first device reaching the second.
fn peers(value: &str) -> Result<u64> {
    match value {
        "all" => return Ok(u64::MAX),
        "none" => return Ok(0),
        _ => {}
    }
    let mut bits = 0;
    for pair in value.split('+') {
        let (a, b) = pair.split_once('-').ok_or(Error::INVALID_VALUE)?;
        let (a, b): (u32, u32) = (number(a)?, number(b)?);
        if a > 7 || b > 7 {
            return Err(Error::INVALID_VALUE);
        }
        bits |= 1 << (a * 8 + b);
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_the_environment_change_the_settings_they_name() {
        let (config, others) =
            Config::parse("devices=3,version=13.0 memory=2MiB;alloc_oom=2 peers=0-1").unwrap();
        assert_eq!((config.devices, config.version, config.memory), (3, 13000, 2 << 20));
        assert_eq!(others, [("alloc_oom".to_owned(), "2".to_owned())]);
        assert!(config.peer(0, 1) && !config.peer(1, 0) && config.peer(2, 2));
    }

    #[test]
    fn malformed_pairs_are_refused() {
        for text in ["devices", "devices=x", "version=9.9", "h2d_gbps=0", "peers=0-9", "hosts=no"] {
            assert!(Config::parse(text).is_err(), "{text}");
        }
    }
}
