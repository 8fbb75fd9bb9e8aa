//! The pairs of a case and its limit, which are measured in turns.
//!
//! Both sides of a pair are measured within tens of milliseconds, so other load slows both alike. The side
//! that comes first alternates. Each pair has a ratio; the result is their median with its quartiles.

use serde::Serialize;

/// The median and the quartiles of some values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// Three quarters of the values are not below it.
    pub(crate) q1: f64,
    pub(crate) median: f64,
    /// Three quarters of the values are not above it.
    pub(crate) q3: f64,
}

/// The median; of an even number of values the mean of the two in the middle. `None` without values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    let lower = *sorted.get(sorted.len() / 2 - 1)?;
    Some(lower.midpoint(upper))
}

/// The pairs of a case and its limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Pairs {
    results: Vec<f64>,
    limits: Vec<f64>,
}

impl Spread {
    /// The spread of `values`; `None` without values.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        Some(Self {
            q1: quantile(&sorted, 0.25)?,
            median: median(&sorted)?,
            q3: quantile(&sorted, 0.75)?,
        })
    }
}

/// The quantile `rank` of `sorted`, interpolated between neighbours.
fn quantile(sorted: &[f64], rank: f64) -> Option<f64> {
    let place = rank * sorted.len().checked_sub(1)? as f64;
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank between 0 and 1 times a count is a count"
    )]
    let below = place.floor() as usize;
    let low = *sorted.get(below)?;
    let high = *sorted.get(below + 1).unwrap_or(&low);
    Some(low + (high - low) * (place - place.floor()))
}

impl Pairs {
    /// Adds a pair, or a result without a limit.
    pub(crate) fn add(&mut self, result: f64, limit: Option<f64>) {
        self.results.push(result);
        self.limits.extend(limit);
    }

    /// The result of the case in each pair.
    pub(crate) fn results(&self) -> &[f64] {
        &self.results
    }

    /// The results of the case.
    pub(crate) fn result(&self) -> Option<Spread> {
        Spread::of(&self.results)
    }

    /// The results of the limit.
    pub(crate) fn limit(&self) -> Option<Spread> {
        Spread::of(&self.limits)
    }

    /// Result divided by limit, for each pair whose limit is not zero.
    pub(crate) fn ratios(&self) -> Vec<f64> {
        self.results
            .iter()
            .zip(&self.limits)
            .filter(|(_, limit)| **limit > 0.0)
            .map(|(result, limit)| result / limit)
            .collect()
    }

    /// The spread of these ratios.
    pub(crate) fn ratio(&self) -> Option<Spread> {
        Spread::of(&self.ratios())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn quartiles_lie_between_neighbours() {
        let spread = Spread::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((spread.q1, spread.median, spread.q3), (1.75, 2.5, 3.25));
        let spread = Spread::of(&[5.0, 1.0, 3.0, 2.0, 4.0]).unwrap();
        assert_eq!((spread.q1, spread.median, spread.q3), (2.0, 3.0, 4.0));
        let one = Spread::of(&[7.0]).unwrap();
        assert_eq!((one.q1, one.median, one.q3), (7.0, 7.0, 7.0));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn each_pair_has_its_own_ratio() {
        // The machine halves its speed in two of five pairs: the pairs' ratios do not notice.
        let mut pairs = Pairs::default();
        for (result, limit) in [
            (9.0, 10.0),
            (4.5, 5.0),
            (9.0, 10.0),
            (4.5, 5.0),
            (9.0, 10.0),
        ] {
            pairs.add(result, Some(limit));
        }
        let ratio = pairs.ratio().unwrap();
        assert!((ratio.q1 - 0.9).abs() < 1e-9 && (ratio.q3 - 0.9).abs() < 1e-9);
        assert_eq!(pairs.result().unwrap().median, 9.0);
        assert_eq!(pairs.limit().unwrap().median, 10.0);
    }

    #[test]
    fn without_a_limit_there_is_no_ratio() {
        let mut pairs = Pairs::default();
        pairs.add(1.0, None);
        assert_eq!(pairs.ratio(), None);
        assert_eq!(pairs.limit(), None);
        assert_eq!(pairs.result().unwrap().median, 1.0);
        let mut still = Pairs::default();
        still.add(1.0, Some(0.0));
        assert_eq!(still.ratio(), None, "nothing is a ratio of nothing");
    }
}
