//! Medians, quartiles and percentiles.

use serde::{Deserialize, Serialize};

/// Distribution of a figure over several rounds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    /// First and third quartile: half of the rounds lie between them.
    pub(crate) q1: f64,
    pub(crate) q3: f64,
    /// Figures in the order in which they were measured.
    pub(crate) rounds: Vec<f64>,
}

impl Spread {
    /// Distribution of the figures of at least one round.
    pub(crate) fn of(rounds: Vec<f64>) -> Spread {
        let mut sorted = rounds.clone();
        sorted.sort_by(f64::total_cmp);
        Spread {
            median: quantile(&sorted, 0.5),
            q1: quantile(&sorted, 0.25),
            q3: quantile(&sorted, 0.75),
            rounds,
        }
    }

    /// Round by round: both values of a ratio were measured at about the same time.
    pub(crate) fn ratio(above: &[f64], below: &[f64]) -> Spread {
        assert_eq!(above.len(), below.len(), "a ratio needs both figures of every round");
        Spread::of(above.iter().zip(below).map(|(a, b)| a / b).collect())
    }
}

/// The value below which `part` of the sorted samples lie, interpolated between neighbours.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    assert!(!sorted.is_empty(), "a quantile needs a sample");
    let at = part * (sorted.len() - 1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64)
}

/// The value below which `part` (0 to 1) of the samples lie. Sorts them. Panics without a sample.
pub fn quantile_of(samples: &mut [f64], part: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    quantile(samples, part)
}

/// The middle of the samples, which may be in any order. Panics without a sample.
pub fn median(samples: &[f64]) -> f64 {
    quantile_of(&mut samples.to_vec(), 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_ignores_order_and_one_outlier() {
        assert_eq!(median(&[3.0, 1.0, 1000.0]), 3.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn quartiles_hold_half_of_the_rounds() {
        let spread = Spread::of(vec![5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!((spread.q1, spread.median, spread.q3), (2.0, 3.0, 4.0));
        assert_eq!(spread.rounds, [5.0, 1.0, 4.0, 2.0, 3.0], "rounds keep their order");
    }

    #[test]
    fn percentiles_of_many_samples_are_where_they_should_be() {
        let mut samples: Vec<f64> = (0..=1000).rev().map(f64::from).collect();
        assert_eq!(quantile_of(&mut samples, 0.99), 990.0);
        assert_eq!(quantile_of(&mut samples, 0.0), 0.0);
        assert_eq!(quantile_of(&mut samples, 1.0), 1000.0);
    }

    #[test]
    fn a_ratio_is_taken_round_by_round() {
        let ratio = Spread::ratio(&[1.0, 20.0, 3.0], &[2.0, 40.0, 3.0]);
        assert_eq!(ratio.rounds, [0.5, 0.5, 1.0]);
        assert_eq!(ratio.median, 0.5);
    }
}
