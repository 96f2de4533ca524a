//! Retention: how long a block is to stay, as its owner wishes.

/// The unit of [`Retention::until_s`] in [`Retention::to_bits`].
const UNIT_S: u32 = 16;
const UNTIL_MAX: u32 = (1 << 24) - 1;
const THEN_SHIFT: u32 = 24;
const PRIORITY_SHIFT: u32 = 25;

/// Retention of a block. Blocks of a lower priority leave first, regardless of their worth. The
/// meaning is that of TensorRT-LLM's `KvCacheRetentionConfig`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// 0 to 100.
    pub priority: u8,
    /// End of the retention, in seconds on the policy's clock.
    pub until_s: Option<u32>,
    /// Treatment of the block after the end.
    pub then: OnExpiry,
}

/// Treatment of a block after the end of its retention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnExpiry {
    /// The block gets the default priority.
    Default,
    /// The block leaves at the next occasion.
    Leave,
}

impl Retention {
    /// The highest priority.
    pub const PRIORITY_MAX: u8 = 100;
    /// The default priority, without an end.
    pub const DEFAULT: Self = Self { priority: 35, until_s: None, then: OnExpiry::Default };

    /// Encodes the retention for the index. The end is rounded up to 16 s; the largest that can be
    /// stored is after eight years.
    pub fn to_bits(self) -> u32 {
        let units = |until_s: u32| until_s.div_ceil(UNIT_S).clamp(1, UNTIL_MAX);
        let then = u32::from(self.then == OnExpiry::Leave && self.until_s.is_some());
        u32::from(self.priority.min(Self::PRIORITY_MAX)) << PRIORITY_SHIFT
            | then << THEN_SHIFT
            | self.until_s.map_or(0, units)
    }

    /// Decodes [`Retention::to_bits`]. Every number is valid.
    pub fn from_bits(bits: u32) -> Self {
        let priority = u8::try_from(bits >> PRIORITY_SHIFT).expect("seven bits");
        let until_s = match bits & UNTIL_MAX {
            0 => None,
            units => Some(units * UNIT_S),
        };
        let leaves = bits >> THEN_SHIFT & 1 == 1 && until_s.is_some();
        let then = if leaves { OnExpiry::Leave } else { OnExpiry::Default };
        Self { priority: priority.min(Self::PRIORITY_MAX), until_s, then }
    }

    /// The retention at `now_ms`: without an end that has passed. `None`: the block is to leave.
    pub(crate) fn at(self, now_ms: u64) -> Option<Self> {
        match (self.until_s, self.then) {
            (Some(until_s), then) if u64::from(until_s) * 1000 <= now_ms => match then {
                OnExpiry::Default => Some(Self::DEFAULT),
                OnExpiry::Leave => None,
            },
            _ => Some(self),
        }
    }
}

impl Default for Retention {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_mean_what_was_stored_with_the_end_rounded_up() {
        for priority in 0..=100 {
            for (until_s, stored) in [(None, None), (Some(0), Some(16)), (Some(16), Some(16))] {
                for then in [OnExpiry::Default, OnExpiry::Leave] {
                    let retention = Retention { priority, until_s, then };
                    let read = Retention::from_bits(retention.to_bits());
                    assert_eq!((read.priority, read.until_s), (priority, stored));
                    assert!(read.then == then || until_s.is_none());
                }
            }
        }
        let late = Retention { until_s: Some(u32::MAX), ..Retention::DEFAULT };
        assert_eq!(Retention::from_bits(late.to_bits()).until_s, Some(UNTIL_MAX * UNIT_S));
    }

    #[test]
    fn any_bits_have_a_meaning_that_stays() {
        let mut rng = fastrand::Rng::with_seed(1);
        for bits in std::iter::repeat_with(|| rng.u32(..)).take(10_000).chain([0, u32::MAX]) {
            let retention = Retention::from_bits(bits);
            assert!(retention.priority <= Retention::PRIORITY_MAX);
            assert_eq!(Retention::from_bits(retention.to_bits()), retention);
        }
    }
}
