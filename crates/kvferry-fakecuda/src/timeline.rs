//! The rate model: when each operation would begin and end on hardware, in virtual ns.
//!
//! Times are computed in the order of submission, from the graph of operations alone. What the
//! scheduler does in real time has no influence, so one submitting thread gets the same numbers
//! in every run.

use crate::config::Rates;

/// The part of a device that an operation occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    HostToDevice,
    DeviceToHost,
    DeviceToDevice,
    Compute,
    /// Markers, waits and host functions.
    None,
}

impl Engine {
    pub(crate) const COUNT: usize = 4;

    /// Operations that it runs at a time.
    pub(crate) fn width(self) -> usize {
        match self {
            Self::DeviceToDevice => 2,
            Self::None => usize::MAX,
            _ => 1,
        }
    }

    pub(crate) fn bit(self) -> u32 {
        if self == Self::None { 0 } else { 1 << self as u32 }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::HostToDevice => "H2D copy",
            Self::DeviceToHost => "D2H copy",
            Self::DeviceToDevice => "D2D copy",
            Self::Compute => "kernel",
            Self::None => "marker",
        }
    }
}

/// Intervals in which one lane of an engine is busy, sorted.
type Lane = Vec<(u64, u64)>;

/// The virtual clock of the process and the engines' occupation.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    now: u64,
    /// The lanes of each device's engines.
    busy: Vec<[Vec<Lane>; Engine::COUNT]>,
}

impl Timeline {
    pub(crate) fn new(devices: usize) -> Self {
        Self { now: 0, busy: (0..devices).map(|_| Default::default()).collect() }
    }

    /// The host's time.
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    pub(crate) fn advance(&mut self, ns: u64) {
        self.now = self.now.saturating_add(ns);
    }

    /// The host has waited for something that ended at `end`.
    pub(crate) fn reach(&mut self, end: u64) {
        self.now = self.now.max(end);
    }

    /// Books `duration` on an engine, at the earliest gap not before `ready`; returns the end.
    pub(crate) fn book(&mut self, device: usize, engine: Engine, ready: u64, duration: u64) -> u64 {
        let ready = ready.max(self.now);
        if engine == Engine::None {
            return ready + duration;
        }
        let lanes = &mut self.busy[device][engine as usize];
        lanes.resize(engine.width(), Vec::new());
        let mut best = (u64::MAX, 0, 0);
        for (index, lane) in lanes.iter_mut().enumerate() {
            lane.retain(|&(_, end)| end > self.now);
            let mut start = ready;
            let mut place = lane.len();
            for (at, &(from, to)) in lane.iter().enumerate() {
                if start + duration <= from {
                    place = at;
                    break;
                }
                start = start.max(to);
            }
            if start < best.0 {
                best = (start, index, place);
            }
        }
        let (start, index, place) = best;
        let end = start + duration;
        lanes[index].insert(place, (start, end));
        end
    }
}

impl Rates {
    /// The duration of one copy operation with the lengths of its entries.
    pub(crate) fn copy_ns(&self, engine: Engine, lens: impl Iterator<Item = u64>) -> u64 {
        let large = match engine {
            Engine::HostToDevice => self.h2d,
            Engine::DeviceToHost => self.d2h,
            _ => self.d2d,
        };
        let mut ns = self.op_ns as f64;
        for len in lens {
            let rate = if len < self.cliff { self.small.min(large) } else { large };
            ns += self.entry_ns as f64 + len as f64 / rate;
        }
        ns as u64
    }

    /// The duration of a kernel that moves so many bytes. `host`: of mapped host memory.
    pub(crate) fn kernel_ns(&self, bytes: u64, host: bool) -> u64 {
        let rate = if host { self.kernel_host } else { self.kernel };
        self.launch_ns + (bytes as f64 / rate) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_fills_gaps_and_runs_as_much_at_a_time_as_it_is_wide() {
        let mut line = Timeline::new(1);
        assert_eq!(line.book(0, Engine::HostToDevice, 100, 50), 150);
        assert_eq!(line.book(0, Engine::HostToDevice, 0, 100), 100);
        assert_eq!(line.book(0, Engine::HostToDevice, 0, 1), 151);
        assert_eq!(line.book(0, Engine::DeviceToHost, 0, 10), 10);
        assert_eq!(line.book(0, Engine::DeviceToDevice, 0, 10), 10);
        assert_eq!(line.book(0, Engine::DeviceToDevice, 0, 10), 10);
        assert_eq!(line.book(0, Engine::DeviceToDevice, 0, 10), 20);
        line.reach(500);
        assert_eq!(line.book(0, Engine::HostToDevice, 0, 5), 505);
    }

    #[test]
    fn entries_below_the_cliff_are_slower_by_the_byte() {
        let rates = Rates::default();
        let small = rates.copy_ns(Engine::HostToDevice, std::iter::repeat_n(4096, 256));
        let large = rates.copy_ns(Engine::HostToDevice, std::iter::once(1 << 20));
        assert!(small > 5 * large, "{small} {large}");
    }
}
