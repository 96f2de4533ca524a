//! Settings of the environment.

use super::STAGES;
use crate::cost::Method;
use kvferry_sys::sync::Mutex;
use std::env;
use std::ops::RangeInclusive;
use std::time::Duration;

/// Stages that are pinned before they are used: 32 MiB, as many as a transfer with a file has.
const PIN_AHEAD: usize = 8;
/// The fewest and the most stages that a setting may name: 8 MiB to 4 GiB.
const STAGES_ALLOWED: RangeInclusive<usize> = 2..=1024;

/// How GPUs copy, for measurements and tests. A GPU takes its number of stages when its first range is registered, and
/// the other settings when its thread starts to copy. The default is what tests begin with: it pins nothing ahead, and
/// unpins nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// `KVFERRY_GPU_METHOD`: `copy`, `batch`, `kernel` or `gather` makes all copies that it can, however long they take.
    pub method: Option<Method>,
    /// `KVFERRY_GPU_CALIBRATE=off`: times are not measured.
    pub is_uncalibrated: bool,
    /// `KVFERRY_GPU_BLOCKS`: the most blocks of a launch of the kernel.
    pub blocks_max: Option<u32>,
    /// `KVFERRY_GPU_STAGES`: the stages of a GPU, at most.
    pub stages: Option<usize>,
    /// `KVFERRY_GPU_PIN_AHEAD`: stages that are pinned before they are used, while the GPU has nothing to copy.
    pub pin_ahead: usize,
    /// `KVFERRY_GPU_UNPIN_AFTER`: time without a copy after which the other stages are unpinned. `None`, or `off`: never. That
    /// is the default: a driver may keep a call that unpins until a kernel has ended, which may wait for a transfer.
    pub unpin_after: Option<Duration>,
    /// The longest time of all measurements together, and of each one. Each point is then measured once. Tests need
    /// this for a fake GPU, which takes longer than a real one.
    pub patience: Option<Duration>,
}

/// Settings that stand in for those of the environment.
static GIVEN: Mutex<Option<Settings>> = Mutex::new(None);

impl Settings {
    /// Uses `settings` instead of the environment's in this process. `None` goes back to the environment's.
    pub fn give(settings: Option<Self>) {
        *GIVEN.lock() = settings;
    }

    pub(super) fn get() -> Self {
        GIVEN.lock().unwrap_or_else(|| {
            Self::of(|name| Some(env::var_os(name)?.to_string_lossy().into_owned()))
        })
    }

    pub(super) fn stages(&self) -> usize {
        self.stages.unwrap_or(STAGES)
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let mut settings = Self { pin_ahead: PIN_AHEAD, ..Self::default() };
        let mut read = |name, parse: fn(&mut Self, &str) -> Option<()>| {
            let value = variable(name).filter(|value| !value.is_empty());
            if let Some(value) = value.filter(|value| parse(&mut settings, value).is_none()) {
                tracing::warn!(name, value, "the setting is ignored: its value is unknown");
            }
        };
        read("KVFERRY_GPU_METHOD", |settings, value| {
            settings.method = Some(match value {
                "copy" => Method::Copy,
                "batch" => Method::Batch,
                "kernel" => Method::Kernel,
                "gather" => Method::Gather,
                _ => return None,
            });
            Some(())
        });
        read("KVFERRY_GPU_CALIBRATE", |settings, value| {
            settings.is_uncalibrated = match value {
                "off" => true,
                "on" => false,
                _ => return None,
            };
            Some(())
        });
        read("KVFERRY_GPU_BLOCKS", |settings, value| {
            settings.blocks_max = Some(value.parse().ok().filter(|blocks| *blocks > 0)?);
            Some(())
        });
        read("KVFERRY_GPU_STAGES", |settings, value| {
            let stages = value.parse::<usize>().ok();
            settings.stages = Some(stages.filter(|stages| STAGES_ALLOWED.contains(stages))?);
            Some(())
        });
        read("KVFERRY_GPU_PIN_AHEAD", |settings, value| {
            let stages = value.parse::<usize>().ok();
            settings.pin_ahead = stages.filter(|stages| stages <= STAGES_ALLOWED.end())?;
            Some(())
        });
        read("KVFERRY_GPU_UNPIN_AFTER", |settings, value| {
            settings.unpin_after = match value {
                "off" => None,
                seconds => Some(Duration::from_secs(seconds.parse::<u32>().ok()?.into())),
            };
            Some(())
        });
        settings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_those_of_the_environment_and_others_are_ignored() {
        let of = |text: &'static str| {
            Settings::of(move |name| {
                let pairs = text.split(' ').filter_map(|pair| pair.split_once('='));
                let found = pairs.into_iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| value.to_owned())
            })
        };
        let unset = Settings { pin_ahead: 8, unpin_after: None, ..Settings::default() };
        assert_eq!((of(""), unset.stages()), (unset, 64));
        let all = "KVFERRY_GPU_METHOD=gather KVFERRY_GPU_CALIBRATE=off KVFERRY_GPU_BLOCKS=12 \
                   KVFERRY_GPU_STAGES=2 KVFERRY_GPU_PIN_AHEAD=0 KVFERRY_GPU_UNPIN_AFTER=5";
        let wanted = Settings {
            method: Some(Method::Gather),
            is_uncalibrated: true,
            blocks_max: Some(12),
            stages: Some(2),
            pin_ahead: 0,
            unpin_after: Some(Duration::from_secs(5)),
            patience: None,
        };
        assert_eq!((of(all), wanted.stages()), (wanted, 2));
        let bad = "KVFERRY_GPU_METHOD=Kernel KVFERRY_GPU_CALIBRATE=0 KVFERRY_GPU_BLOCKS=0 \
                   KVFERRY_GPU_STAGES=1 KVFERRY_GPU_PIN_AHEAD=1025 KVFERRY_GPU_UNPIN_AFTER=-1";
        assert_eq!(of(bad), unset);
        assert_eq!(of("KVFERRY_GPU_STAGES=1025 KVFERRY_GPU_PIN_AHEAD=-1"), unset);
        assert_eq!(of("KVFERRY_GPU_UNPIN_AFTER=off"), unset);
        let unpin_after = Some(Duration::from_secs(60));
        assert_eq!(of("KVFERRY_GPU_UNPIN_AFTER=60"), Settings { unpin_after, ..unset });
    }
}
