//! Times of copies on one device, as a value that can be stored.

use crate::cost::{Cost, Curve, Method};
use crate::fit;
use crate::job::Direction;
use crate::samples::Sample;
use serde::{Deserialize, Serialize};

/// The version of the text form. Another version is refused: what it means may be something else.
const VERSION: u32 = 1;

/// Copies of one batch call. Longer calls took longer for each copy on an H100 (driver 580).
pub const BATCH_ENTRIES: u32 = 128;

/// The largest number of copies of one batch call.
const BATCH_ENTRIES_MAX: u32 = 1 << 16;

/// The device and driver that a calibration is valid for. Another driver may copy differently.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceKey {
    /// The device's UUID as 32 hexadecimal digits.
    pub uuid: String,
    /// The driver's version, such as 13000 for CUDA 13.0.
    pub driver: u32,
}

impl DeviceKey {
    /// The key of the device with this UUID, as the driver gives it.
    pub fn new(uuid: [u8; 16], driver: u32) -> Self {
        let uuid = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        Self { uuid, driver }
    }

    fn is_valid(&self) -> bool {
        self.uuid.len() == 32 && self.uuid.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    }
}

/// What methods take in one direction. A planner uses no method without costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Costs {
    /// Single copies, which each driver has.
    pub copy: Cost,
    /// Batches of copies.
    pub batch: Option<Cost>,
    /// The kernel on mapped host memory.
    pub kernel: Option<Cost>,
    /// The kernel inside the device's memory.
    pub gather: Option<Cost>,
}

impl Costs {
    /// The costs of a method.
    pub fn of(&self, method: Method) -> Option<&Cost> {
        match method {
            Method::Copy => Some(&self.copy),
            Method::Batch => self.batch.as_ref(),
            Method::Kernel => self.kernel.as_ref(),
            Method::Gather => self.gather.as_ref(),
        }
    }

    fn is_valid(&self) -> bool {
        Method::ALL.into_iter().filter_map(|method| self.of(method)).all(Cost::is_valid)
    }
}

/// Times of copies on one device with one driver.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    version: u32,
    /// The device, or `None` if nothing was measured.
    pub device: Option<DeviceKey>,
    /// Copies of one batch call, at most.
    pub batch_entries: u32,
    /// Costs of copies out of the device's memory.
    pub out: Costs,
    /// Costs of copies into the device's memory.
    #[serde(rename = "in")]
    pub into: Costs,
}

impl Default for Calibration {
    /// For an unknown device: the copy engine only, with times between those of PCIe 3 and 5.
    fn default() -> Self {
        let curve = |entry_ns| Curve::of_rate(entry_ns, 20.0).expect("positive and rising");
        let copy = Cost { call_ns: 0.0, entry: curve(2_500.0) };
        let batch = Some(Cost { call_ns: 5_000.0, entry: curve(700.0) });
        let costs = Costs { copy, batch, kernel: None, gather: None };
        let (version, device, batch_entries) = (VERSION, None, BATCH_ENTRIES);
        Self { version, device, batch_entries, out: costs.clone(), into: costs }
    }
}

impl Calibration {
    /// The calibration of a device by times measured on it. The copy engine has default costs where its methods were
    /// not measured; the kernel has none.
    ///
    /// # Errors
    /// A sample without entries, bytes or time, or a method that was measured at one size only.
    pub fn fit(device: DeviceKey, samples: &[Sample]) -> Result<Self, CalibrationError> {
        if !device.is_valid() {
            return Err(CalibrationError::Device);
        }
        let mut calibration = Self { device: Some(device), ..Self::default() };
        let entries = calibration.batch_entries;
        for direction in [Direction::Out, Direction::In] {
            let costs = match direction {
                Direction::Out => &mut calibration.out,
                Direction::In => &mut calibration.into,
            };
            let fitted = |method| fit::cost(samples, method, direction, entries);
            costs.copy = fitted(Method::Copy)?.unwrap_or(costs.copy);
            costs.batch = fitted(Method::Batch)?.or(costs.batch);
            costs.kernel = fitted(Method::Kernel)?;
            costs.gather = fitted(Method::Gather)?;
        }
        Ok(calibration)
    }

    /// Costs by which plans use one method wherever they can, for measurements and tests. Single copies make the copies
    /// that the method can't.
    #[doc(hidden)]
    pub fn only(method: Method) -> Self {
        let flat =
            |ns| Cost { call_ns: 0.0, entry: Curve::new([ns; Curve::POINTS]).expect("equal") };
        let only = |wanted: Method| (method == wanted).then(|| flat(0.0));
        let costs = Costs {
            // A copy to or from the staging costs something, and less than two copies of the engine.
            copy: flat(1e9),
            batch: only(Method::Batch),
            kernel: only(Method::Kernel),
            gather: only(Method::Gather),
        };
        Self { out: costs.clone(), into: costs, ..Self::default() }
    }

    /// The costs of a direction.
    pub fn costs(&self, direction: Direction) -> &Costs {
        match direction {
            Direction::Out => &self.out,
            Direction::In => &self.into,
        }
    }

    /// True if the calibration was measured on this device with this driver.
    pub fn is_of(&self, device: &DeviceKey) -> bool {
        self.device.as_ref() == Some(device)
    }

    /// The calibration as text, to be stored.
    pub fn to_text(&self) -> String {
        serde_json::to_string_pretty(self).expect("its keys are strings and its numbers finite")
    }

    /// The calibration of a text that [`Calibration::to_text`] made.
    ///
    /// # Errors
    /// A text of another form or version, or with numbers that are no costs.
    pub fn from_text(text: &str) -> Result<Self, CalibrationError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let malformed = |error| CalibrationError::Malformed { error };
        let Versioned { version } = serde_json::from_str(text).map_err(malformed)?;
        if version != VERSION {
            return Err(CalibrationError::Version { found: version });
        }
        let read: Self = serde_json::from_str(text).map_err(malformed)?;
        read.check()?;
        Ok(read)
    }

    /// Checks numbers that the caller may have set.
    pub(crate) fn check(&self) -> Result<(), CalibrationError> {
        if !self.device.as_ref().is_none_or(DeviceKey::is_valid) {
            return Err(CalibrationError::Device);
        }
        if !(1..=BATCH_ENTRIES_MAX).contains(&self.batch_entries) {
            return Err(CalibrationError::BatchEntries { found: self.batch_entries });
        }
        let is_valid = self.out.is_valid() && self.into.is_valid();
        is_valid.then_some(()).ok_or(CalibrationError::Costs)
    }
}

/// Reason why there is no calibration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// The text is not that of a calibration.
    #[error("malformed calibration: {error}")]
    Malformed {
        /// The parser's error.
        error: serde_json::Error,
    },
    /// The text has another version.
    #[error("calibration of version {found}, expected {VERSION}")]
    Version {
        /// The version in the text.
        found: u32,
    },
    /// The device's UUID is not 32 lower-case hexadecimal digits.
    #[error("the UUID of a calibration's device is not 32 lower-case hexadecimal digits")]
    Device,
    /// The number of copies of a batch call is out of range.
    #[error("{found} copies of one batch call, expected 1 to {BATCH_ENTRIES_MAX}")]
    BatchEntries {
        /// The number.
        found: u32,
    },
    /// A time is negative, longer than a minute, or falls as sizes rise.
    #[error("a calibration's time is negative, longer than a minute, or falls as sizes rise")]
    Costs,
    /// A sample has no entries, no bytes, or no time.
    #[error("sample {index} has no entries, no bytes or no time")]
    EmptySample {
        /// The sample's index.
        index: usize,
    },
    /// A method was measured at one size only.
    #[error("{method:?} {direction:?} was measured at one size only")]
    OneSize {
        /// The method.
        method: Method,
        /// The direction.
        direction: Direction,
    },
}
