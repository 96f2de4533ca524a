//! Axes: round numbers around all values, and the place of a value between them.

/// Ticks in ascending order, two at least.
#[derive(Debug)]
pub(super) struct Scale {
    ticks: Vec<f64>,
    is_logarithmic: bool,
}

impl Scale {
    /// Linear scale from zero to above `top`.
    pub(super) fn from_zero(top: f64) -> Scale {
        Scale { ticks: linear_ticks(top), is_logarithmic: false }
    }

    /// Logarithmic scale around all values, which are above zero.
    pub(super) fn logarithmic(values: impl Iterator<Item = f64>) -> Scale {
        let (low, high) =
            values.fold((f64::INFINITY, 0.0f64), |(low, high), it| (low.min(it), high.max(it)));
        Scale { ticks: logarithmic_ticks(low, high), is_logarithmic: true }
    }

    /// 0 at the first tick, 1 at the last.
    pub(super) fn place(&self, value: f64) -> f64 {
        let (low, high) = (self.ticks[0], self.ticks[self.ticks.len() - 1]);
        match self.is_logarithmic {
            true => (value / low).ln() / (high / low).ln(),
            false => (value - low) / (high - low),
        }
    }

    /// Ticks with their numbers. With many decades, only powers of ten have room.
    pub(super) fn labels(&self) -> impl Iterator<Item = (f64, String)> {
        let is_power = |tick: f64| (tick.log10() - tick.log10().round()).abs() < 1e-9;
        let has_room = move |at: usize, tick: f64| {
            at == 0 || !self.is_logarithmic || self.ticks.len() <= 10 || is_power(tick)
        };
        let ticks = self.ticks.iter().copied().enumerate();
        ticks.filter(move |&(at, tick)| has_room(at, tick)).map(|(_, tick)| (tick, short(tick)))
    }

    pub(super) fn ticks(&self) -> &[f64] {
        &self.ticks
    }
}

/// Zero, and round steps to above `top`.
fn linear_ticks(top: f64) -> Vec<f64> {
    let rough = (top / 6.0).max(f64::MIN_POSITIVE);
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0].map(|of| of * power).into_iter().find(|&s| s >= rough);
    let step = step.expect("ten times the power is above");
    let steps = (top / step).ceil().max(1.0) as usize;
    (0..=steps).map(|at| at as f64 * step).collect()
}

/// 1, 2, 5, 10, … around both.
fn logarithmic_ticks(bottom: f64, top: f64) -> Vec<f64> {
    let (bottom, top) = (bottom.max(1e-9), top.max(2e-9));
    let from = bottom.log10().floor() as i32;
    let to = top.log10().ceil() as i32;
    let all: Vec<f64> =
        (from..=to).flat_map(|power| [1.0, 2.0, 5.0].map(|of| of * 10f64.powi(power))).collect();
    let first = all.iter().rposition(|&tick| tick <= bottom).unwrap_or(0);
    let last = all.iter().position(|&tick| tick >= top).unwrap_or(all.len() - 1);
    all[first..=last.max(first + 1)].to_vec()
}

/// A tick's number without zeros that say nothing.
fn short(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_hold_every_value_and_are_round() {
        assert_eq!(linear_ticks(5.6), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(linear_ticks(0.0).len(), 2);
        assert_eq!(logarithmic_ticks(0.3, 7.0), [0.2, 0.5, 1.0, 2.0, 5.0, 10.0]);
        assert_eq!(logarithmic_ticks(1.0, 1.0), [1.0, 2.0]);
        assert_eq!(
            (short(0.25), short(10.0), short(0.0)),
            ("0.25".into(), "10".into(), "0".into())
        );
    }

    #[test]
    fn many_decades_are_labelled_by_their_powers_of_ten() {
        let scale = Scale::logarithmic([0.3, 70_000.0].into_iter());
        let labels: Vec<String> = scale.labels().map(|(_, label)| label).collect();
        assert_eq!(labels, ["0.2", "1", "10", "100", "1000", "10000", "100000"]);
        assert_eq!((scale.place(0.2), scale.place(100_000.0)), (0.0, 1.0));
    }
}
