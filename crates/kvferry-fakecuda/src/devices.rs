//! Devices as a process sees them, and their primary contexts.

use std::os::unix::ffi::OsStrExt;

use crate::abi::{Error, Uuid};
use crate::timeline::Engine;

/// A device by its visible ordinal.
#[derive(Debug)]
pub(crate) struct Device {
    /// The number among all devices of the host, the same in all processes.
    pub(crate) physical: usize,
    /// Bytes taken, context included.
    pub(crate) used: u64,
    pub(crate) primary: Option<Primary>,
    /// Operations that occupy each engine.
    pub(crate) busy: [usize; Engine::COUNT],
    /// Bit d: `cuCtxEnablePeerAccess` lets kernels of this device reach device d.
    pub(crate) enabled: u8,
    /// The error of each new context, once the device is gone.
    pub(crate) removed: Option<Error>,
}

/// A primary context that is alive.
#[derive(Debug)]
pub(crate) struct Primary {
    pub(crate) handle: usize,
    pub(crate) references: u64,
    /// The error that sticks.
    pub(crate) lost: Option<Error>,
    pub(crate) legacy: Option<usize>,
}

impl Device {
    pub(crate) fn new(physical: usize) -> Self {
        let busy = [0; Engine::COUNT];
        Self { physical, used: 0, primary: None, busy, enabled: 0, removed: None }
    }

    /// An identity that depends on the physical device only.
    pub(crate) fn uuid(&self) -> Uuid {
        uuid(self.physical)
    }

    pub(crate) fn bus(&self) -> usize {
        0x10 + self.physical
    }

    pub(crate) fn pci(&self) -> String {
        format!("0000:{:02X}:00.0", self.bus())
    }
}

fn uuid(physical: usize) -> Uuid {
    let mut bytes = *b"kvferry-fakecud\0";
    bytes[15] = physical as u8;
    Uuid(bytes)
}

/// `GPU-` and the hexadecimal groups, as tools print it.
pub(crate) fn uuid_text(uuid: Uuid) -> String {
    let hex: String = uuid.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    format!("GPU-{a}-{b}-{c}-{d}-{e}")
}

/// The visible devices in the order of `CUDA_VISIBLE_DEVICES`: ordinals or prefixes of UUIDs.
/// As with the driver, the first entry that names no device ends the list.
pub(crate) fn visible(count: usize) -> Vec<Device> {
    let all = || (0..count).map(Device::new).collect();
    let Some(text) = std::env::var_os("CUDA_VISIBLE_DEVICES") else {
        return all();
    };
    let text = String::from_utf8_lossy(text.as_bytes()).into_owned();
    let mut devices: Vec<Device> = Vec::new();
    for entry in text.split(',').map(str::trim) {
        let found = match entry.parse::<usize>() {
            Ok(ordinal) => Some(ordinal).filter(|&ordinal| ordinal < count),
            Err(_) if entry.starts_with("GPU-") => {
                (0..count).find(|&physical| uuid_text(uuid(physical)).starts_with(entry))
            }
            Err(_) => None,
        };
        match found {
            Some(physical) if devices.iter().all(|d| d.physical != physical) => {
                devices.push(Device::new(physical));
            }
            _ => break,
        }
    }
    devices
}
