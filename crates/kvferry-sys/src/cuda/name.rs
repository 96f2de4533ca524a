//! Names of devices.

use super::device::{Device, DeviceUuid};
use super::error::{Error, Result};
use super::load::Driver;
use std::fmt;
use std::str::FromStr;

/// A name of a device. The same device has other numbers in other processes; UUID and address are the same in all.
///
/// The text of a name is the number (`1`), the UUID as `nvidia-smi -L` has it (`GPU-…`), or the address on the PCI bus
/// (`0000:1b:00.0`), each of them also behind `cuda:`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceName {
    /// The number in this process.
    Ordinal(i32),
    /// The UUID.
    Uuid(DeviceUuid),
    /// The address on the PCI bus.
    Pci(PciAddress),
}

/// An address on the PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciAddress {
    domain: u32,
    bus: u32,
    device: u32,
    function: u32,
}

impl Driver {
    /// The device of that name. One of which the driver does not tell UUID or address is not it.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], with the devices that there are; the driver's, if none of those is the one and the driver does
    /// not tell the name of another; in a forked child.
    pub fn device_named(&'static self, name: DeviceName) -> Result<Device> {
        let mut refused = None;
        for device in self.devices()? {
            let is_meant = match name {
                DeviceName::Ordinal(ordinal) => Ok(device.ordinal() == ordinal),
                DeviceName::Uuid(uuid) => device.uuid().map(|it| it == uuid),
                DeviceName::Pci(address) => {
                    device.pci_bus_id().map(|it| address_of(&it) == Some(address))
                }
            };
            match is_meant {
                Ok(true) => return Ok(device),
                Ok(false) => {}
                Err(error) => _ = refused.get_or_insert(error),
            }
        }
        Err(refused.unwrap_or_else(|| self.no_such_device(&name)))
    }

    /// The error of a device that this process does not see.
    pub(super) fn no_such_device(&'static self, name: &DeviceName) -> Error {
        let seen = self.devices().unwrap_or_default();
        let seen = seen.iter().map(describe).collect();
        Error::NoSuchDevice { name: name.to_string(), seen }
    }
}

/// A device by its number, and by its UUID and address if the driver tells them.
fn describe(device: &Device) -> String {
    match (device.uuid(), device.pci_bus_id()) {
        (Ok(uuid), Ok(address)) => format!("{} ({uuid}, {address})", device.ordinal()),
        _ => device.ordinal().to_string(),
    }
}

impl From<i32> for DeviceName {
    fn from(ordinal: i32) -> Self {
        Self::Ordinal(ordinal)
    }
}

impl From<DeviceUuid> for DeviceName {
    fn from(uuid: DeviceUuid) -> Self {
        Self::Uuid(uuid)
    }
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = text.strip_prefix("cuda:").unwrap_or(text);
        let is_number = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
        let number = name.parse().ok().filter(|_| is_number).map(Self::Ordinal);
        let uuid = || uuid_of(name).map(Self::Uuid);
        let address = || address_of(name).map(Self::Pci);
        let found = number.or_else(uuid).or_else(address);
        found.ok_or_else(|| Error::BadDeviceName(text.to_owned()))
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ordinal(ordinal) => ordinal.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Pci(address) => address.fmt(f),
        }
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// The number that at most `digits` hexadecimal digits mean.
fn hexadecimal(text: &str, digits: usize) -> Option<u32> {
    let is_one = text.len() <= digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_one { u32::from_str_radix(text, 16).ok() } else { None }
}

/// The UUID that a text means: five groups of hexadecimal digits behind `GPU-`, behind `MIG-` for a part of a device, or
/// behind nothing, as torch has it.
fn uuid_of(text: &str) -> Option<DeviceUuid> {
    const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
    let groups = ["GPU-", "MIG-"].iter().find_map(|it| text.strip_prefix(it)).unwrap_or(text);
    if !groups.is_ascii() || !groups.split('-').map(str::len).eq(GROUPS) {
        return None;
    }
    let digits = groups.replace('-', "");
    let mut uuid = [0; 16];
    for (at, byte) in uuid.iter_mut().enumerate() {
        *byte = u8::try_from(hexadecimal(&digits[2 * at..2 * at + 2], 2)?).ok()?;
    }
    Some(DeviceUuid(uuid))
}

/// The address that a text means: domain, bus and device between colons, and a function behind a point. The domain may be
/// left out if it is 0.
fn address_of(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    Some(PciAddress {
        domain: hexadecimal(domain, 8)?,
        bus: hexadecimal(bus, 2)?,
        device: hexadecimal(device, 2)?,
        function: hexadecimal(function, 1)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: DeviceUuid =
        DeviceUuid([0x1b, 0xa1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff]);

    #[test]
    fn a_device_is_named_by_its_number_its_uuid_or_its_address() {
        let address = |domain, bus| PciAddress { domain, bus, device: 0, function: 0 };
        for (text, name) in [
            ("0", DeviceName::Ordinal(0)),
            ("cuda:11", DeviceName::Ordinal(11)),
            ("GPU-1ba10203-0405-0607-0809-0a0b0c0d0eff", DeviceName::Uuid(UUID)),
            ("cuda:GPU-1BA10203-0405-0607-0809-0A0B0C0D0EFF", DeviceName::Uuid(UUID)),
            ("MIG-1ba10203-0405-0607-0809-0a0b0c0d0eff", DeviceName::Uuid(UUID)),
            ("1ba10203-0405-0607-0809-0a0b0c0d0eff", DeviceName::Uuid(UUID)),
            ("0000:1b:00.0", DeviceName::Pci(address(0, 0x1b))),
            ("cuda:00000001:1B:00.0", DeviceName::Pci(address(1, 0x1b))),
            ("1b:00.0", DeviceName::Pci(address(0, 0x1b))),
        ] {
            assert_eq!(text.parse::<DeviceName>(), Ok(name), "{text}");
            assert_eq!(name.to_string().parse::<DeviceName>(), Ok(name), "{name}");
        }
    }

    #[test]
    fn other_texts_are_refused_with_the_forms_of_names() {
        for text in [
            "",
            "cuda",
            "cuda:",
            "-1",
            "+1",
            "99999999999",
            "GPU",
            "GPU-",
            "GPU-1ba10203",
            "GPU-1ba10203-0405-0607-0809-0a0b0c0d0ef",
            "GPU-1ba10203-0405-0607-0809-0a0b0c0d0efg",
            "GPU-1ba1020304050607-0809-0a0b0c0d-0eff",
            "GPU-1ba10203-0405-0607-0809-0a0b0c0d0e\u{e9}",
            "1b:00",
            "0000:1b:00.",
            "0:0000:1b:00.0",
            "0000:1b:+0.0",
            "0000:11b:00.0",
            "tpu",
        ] {
            let refused = text.parse::<DeviceName>().expect_err(text);
            assert_eq!(refused, Error::BadDeviceName(text.to_owned()));
            assert!(refused.to_string().contains("GPU-"), "{refused}");
        }
    }
}
