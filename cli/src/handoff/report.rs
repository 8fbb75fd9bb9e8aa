//! The rates of hand-offs in each round, and the report over all rounds.

use super::Load;
use crate::output;
use serde::Serialize;
use std::collections::BTreeMap;

/// The cases of a round, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
enum Case {
    Tcp,
    TcpHot,
    Push,
    Pull,
    Slices,
    Layerwise,
}

impl Case {
    const ALL: [Self; 6] = [
        Self::Tcp,
        Self::TcpHot,
        Self::Push,
        Self::Pull,
        Self::Slices,
        Self::Layerwise,
    ];
}

/// The rates of one round, in 10^9 bytes a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    /// Bare TCP between two memories of a request's size.
    pub(super) tcp: f64,
    /// Bare TCP between two memories of one page, again and again: the bytes stay in the processor's caches.
    pub(super) tcp_hot: f64,
    /// One rank of prefill to one of decode, all layers at once.
    pub(super) push: f64,
    /// The same, timed from the request of decode for pages that prefill offers.
    pub(super) pull: f64,
    /// Two ranks of prefill to one of decode: half of the heads of each token from each rank.
    pub(super) slices: f64,
    /// Each layer once it is computed. Computing takes as long as the push and is in the time.
    pub(super) layerwise: f64,
    /// The share of the push's time that computing hides.
    pub(super) hidden: f64,
}

impl Rates {
    const fn of(&self, case: Case) -> f64 {
        match case {
            Case::Tcp => self.tcp,
            Case::TcpHot => self.tcp_hot,
            Case::Push => self.push,
            Case::Pull => self.pull,
            Case::Slices => self.slices,
            Case::Layerwise => self.layerwise,
        }
    }
}

/// The medians of all rounds.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// The bytes of one hand-off.
    bytes: u64,
    rounds: u32,
    /// The streams of bare TCP.
    streams: u32,
    cases: BTreeMap<Case, Figures>,
    /// The share of a push's time that computing hides when each layer is sent once it is computed.
    hidden: f64,
}

/// The rate of one case, and its ratios to other cases of the same round.
#[derive(Debug, Serialize)]
struct Figures {
    /// 10^9 bytes a second.
    gb_per_s: f64,
    of_tcp: f64,
    of_tcp_hot: f64,
    of_push: f64,
}

impl Report {
    pub(super) fn of(load: &Load, rounds: &[Rates]) -> Self {
        let over = |figure: &dyn Fn(&Rates) -> f64| median(rounds.iter().map(figure).collect());
        let ratio =
            |case: Case, limit: Case| over(&|rates: &Rates| rates.of(case) / rates.of(limit));
        let figures = |case: Case| Figures {
            gb_per_s: over(&|rates: &Rates| rates.of(case)),
            of_tcp: ratio(case, Case::Tcp),
            of_tcp_hot: ratio(case, Case::TcpHot),
            of_push: ratio(case, Case::Push),
        };
        Self {
            bytes: load.bytes(),
            rounds: load.rounds,
            streams: load.streams,
            cases: Case::ALL.map(|case| (case, figures(case))).into(),
            hidden: over(&|rates: &Rates| rates.hidden),
        }
    }

    /// The tables for people.
    pub(crate) fn tables(&self) -> String {
        let mut facts = output::facts();
        facts.add_row(["bytes of one hand-off", &output::bytes(self.bytes)]);
        facts.add_row(["rounds", &output::count(u64::from(self.rounds))]);
        facts.add_row(["streams of bare TCP", &self.streams.to_string()]);
        let hidden = format!("{:.2} of the push", self.hidden);
        facts.add_row(["hidden by layerwise", &hidden]);
        let mut cases = output::table([
            "case",
            "GB/s",
            "of bare TCP",
            "of bare TCP, hot",
            "of the push",
        ]);
        for (case, figures) in &self.cases {
            let ratios = [figures.of_tcp, figures.of_tcp_hot, figures.of_push];
            let mut row = vec![output::label(case), format!("{:.2}", figures.gb_per_s)];
            row.extend(ratios.map(|ratio| format!("{ratio:.2}")));
            cases.add_row(row);
        }
        output::align_right(&mut cases, 1..5);
        format!("{facts}\n{cases}")
    }
}

/// The median: of an even number of values, the mean of the middle two.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = values.get(middle).copied().unwrap_or(f64::NAN);
    match values.get(middle.wrapping_sub(1)) {
        Some(lower) if values.len().is_multiple_of(2) => f64::midpoint(*lower, upper),
        _ => upper,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(vec![4.0]), 4.0);
        assert_eq!(median(vec![9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![9.0, 1.0, 2.0, 4.0]), 3.0);
        assert!(median(Vec::new()).is_nan());
    }

    #[test]
    fn a_ratio_is_the_median_of_the_ratios_of_the_rounds() {
        let round = |tcp, push| Rates {
            tcp,
            tcp_hot: 2.0 * tcp,
            push,
            pull: push,
            slices: push / 2.0,
            layerwise: push / 4.0,
            hidden: 0.75,
        };
        let load = Load {
            pages: 4,
            rounds: 3,
            streams: 2,
        };
        // The median of the rates would give a ratio of 2 / 4.
        let report = Report::of(&load, &[round(2.0, 2.0), round(4.0, 1.0), round(8.0, 6.0)]);
        let figures = |case| &report.cases[&case];
        assert_eq!(figures(Case::Tcp).gb_per_s, 4.0);
        assert_eq!(figures(Case::Tcp).of_tcp, 1.0);
        assert_eq!(figures(Case::Push).gb_per_s, 2.0);
        assert_eq!(figures(Case::Push).of_tcp, 0.75);
        assert_eq!(figures(Case::Push).of_tcp_hot, 0.375);
        assert_eq!(figures(Case::Slices).of_push, 0.5);
        assert_eq!(figures(Case::Layerwise).of_push, 0.25);
        let shown = report.tables();
        for name in [
            "4.0 MiB",
            "tcp_hot",
            "slices",
            "layerwise",
            "0.75 of the push",
        ] {
            assert!(shown.contains(name), "{name} in\n{shown}");
        }
    }
}
