//! The report: tables for people, JSON for programs.

use super::cases::{Bound, Case, Goal, Metric};
use super::left_out::LeftOut;
use super::machine::{Machine, PUBLISHED};
use super::pairing::{Pairs, Spread, median};
use super::window::Measured;
use anyhow::bail;
use kvctl::output;
use serde::Serialize;

/// The fewest pairs with which a goal can be met. Fewer have no quartiles beside their median.
pub(crate) const FEWEST_PAIRS: usize = 3;

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    /// Pairs of each case.
    pub(crate) pairs: u32,
    /// The bytes that transfers cycle through on each side.
    pub(crate) span_bytes: u64,
    /// Whether windows were short, which makes the figures unsteady.
    pub(crate) quick: bool,
    /// Whether the run measured an existing pool.
    pub(crate) foreign_pool: bool,
    pub(crate) cases: Vec<Row>,
    /// The network of the TCP cases; empty without such cases.
    pub(crate) tcp: String,
    /// The selected cases that could not be measured here.
    pub(crate) left_out: Vec<LeftOut>,
    /// The number of cases with a goal.
    pub(crate) goals: usize,
    /// The number of cases that met their goal.
    pub(crate) goals_met: usize,
    /// The fewest pairs with which a goal can be met, except for memory.
    pub(crate) fewest_pairs: usize,
    /// The time of the run, in seconds.
    pub(crate) seconds: f64,
}

/// One case.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) case: String,
    pub(crate) group: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) result: Option<Spread>,
    /// The name of the limit; empty without a limit.
    pub(crate) limit: String,
    /// The reason why the case has no limit.
    pub(crate) no_limit: Option<&'static str>,
    pub(crate) limit_result: Option<Spread>,
    /// Result divided by limit, for each pair.
    pub(crate) ratio: Option<Spread>,
    /// The goal as text; empty without a goal.
    pub(crate) goal: String,
    /// The reason why the case has no goal.
    pub(crate) no_goal: Option<&'static str>,
    pub(crate) met: Option<bool>,
    /// Whether it has too few pairs to meet a goal.
    pub(crate) has_few_pairs: bool,
    pub(crate) cpu: Option<Cpu>,
    /// Every pair.
    pub(crate) samples: Pairs,
}

/// Processor seconds, user and system, for 10^9 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Cpu {
    /// All clients.
    pub(crate) client: f64,
    /// kvmaster; `None` if this run did not start it.
    pub(crate) master: Option<f64>,
    /// The store nodes; `None` if this run did not start them, or if they are in the client's process.
    pub(crate) node: Option<f64>,
}

impl Cpu {
    /// The processor time of one window. The first client also counted the master, if it was `watched`, and
    /// then the nodes.
    pub(crate) fn of(all: &[Measured], watched: bool, nodes: usize) -> Self {
        let bytes: u64 = all.iter().map(|measured| measured.units).sum();
        let a_gigabyte = |nanos: u64| nanos as f64 / bytes.max(1) as f64;
        let own = all.iter().filter_map(|measured| measured.cpu_ns.first());
        let counted = all.first().map(|first| first.cpu_ns.as_slice());
        let others = counted
            .and_then(|counted| counted.get(1..))
            .unwrap_or_default();
        let (master, of_nodes) = others.split_at(others.len().min(usize::from(watched)));
        Self {
            client: a_gigabyte(own.sum()),
            master: master.first().copied().map(a_gigabyte),
            node: (nodes > 0).then(|| a_gigabyte(of_nodes.iter().sum())),
        }
    }

    /// The median over some windows, for each process.
    pub(crate) fn median(all: &[Self]) -> Option<Self> {
        let middle =
            |of: fn(&Self) -> Option<f64>| median(&all.iter().filter_map(of).collect::<Vec<f64>>());
        Some(Self {
            client: middle(|cpu| Some(cpu.client))?,
            master: middle(|cpu| cpu.master),
            node: middle(|cpu| cpu.node),
        })
    }
}

impl Row {
    /// Makes the row of a case with this limit. Without a pair there is none.
    pub(crate) fn new(
        case: &Case,
        limit: &str,
        pairs: &Pairs,
        cpu: Option<Cpu>,
    ) -> anyhow::Result<Self> {
        let (result, ratio) = (pairs.result(), pairs.ratio());
        if result.is_none() {
            bail!("nothing was measured: the case has no pair");
        }
        Ok(Self {
            case: case.id.clone(),
            group: case.group,
            unit: case.metric.unit(),
            result,
            limit: limit.to_owned(),
            no_limit: match case.bound {
                Bound::None(why) => Some(why),
                _ => None,
            },
            limit_result: pairs.limit(),
            ratio,
            goal: case.goal.text(case.metric),
            no_goal: match case.goal {
                Goal::None(why) => Some(why),
                _ => None,
            },
            met: case.goal.is_met(case.metric, pairs),
            has_few_pairs: pairs.results().len() < case.metric.fewest_pairs(),
            cpu,
            samples: pairs.clone(),
        })
    }
}

impl Metric {
    /// The unit of the figures.
    pub(crate) const fn unit(self) -> &'static str {
        match self {
            Self::Rate => "GB/s",
            Self::P50 => "us",
            Self::Keys => "M keys/s",
            Self::Cpu => "CPU s/GB",
            Self::Bytes => "bytes",
            Self::Tail | Self::Times => "times",
            Self::Seconds => "s",
        }
    }

    /// The fewest pairs with which a goal can be met. The memory of a process is read once.
    const fn fewest_pairs(self) -> usize {
        match self {
            Self::Bytes => 1,
            _ => FEWEST_PAIRS,
        }
    }
}

impl Goal {
    /// The goal as text; empty without a goal.
    pub(crate) fn text(self, metric: Metric) -> String {
        match self {
            Self::RatioAtLeast(ratio) => format!("≥ {ratio} x"),
            Self::RatioAtMost(ratio) => format!("≤ {ratio} x"),
            Self::AtLeast(value) => format!("≥ {value} {}", metric.unit()),
            Self::AtMost(value) => format!("≤ {value} {}", metric.unit()),
            Self::None(_) => String::new(),
        }
    }

    /// Whether the medians meet the goal, and there are enough pairs; `None` without a goal.
    pub(crate) fn is_met(self, metric: Metric, pairs: &Pairs) -> Option<bool> {
        let of = |values: &[f64], reached: &dyn Fn(f64) -> bool| {
            values.len() >= metric.fewest_pairs() && median(values).is_some_and(reached)
        };
        match self {
            Self::RatioAtLeast(goal) => Some(of(&pairs.ratios(), &|ratio| ratio >= goal)),
            Self::RatioAtMost(goal) => Some(of(&pairs.ratios(), &|ratio| ratio <= goal)),
            Self::AtLeast(goal) => Some(of(pairs.results(), &|result| result >= goal)),
            Self::AtMost(goal) => Some(of(pairs.results(), &|result| result <= goal)),
            Self::None(_) => None,
        }
    }
}

impl Report {
    /// The number of goals, and of goals met.
    pub(crate) fn count_goals(cases: &[Row]) -> (usize, usize) {
        let met = cases.iter().filter_map(|row| row.met);
        (met.clone().count(), met.filter(|met| *met).count())
    }

    /// The text for people: a table for each group, and the closing line.
    pub(crate) fn tables(&self) -> String {
        let Machine {
            cpu,
            cores,
            kernel,
            kvpool,
            profile,
            ..
        } = &self.machine;
        let mut out = vec![format!(
            "kvpool {kvpool} (profile {profile}) on {cores} cores of {cpu}, Linux {kernel}; {} pairs a case, transfers \
             cycle through {} on each side",
            self.pairs,
            output::bytes(self.span_bytes)
        )];
        if !self.machine.optimised {
            out.push("This build is not optimised: its results are meaningless.".to_owned());
        } else if *profile != PUBLISHED {
            out.push(format!(
                "Published results are from the profile {PUBLISHED}, which is faster."
            ));
        }
        if !self.tcp.is_empty() {
            out.push(format!("Cases named tcp/ went over {}.", self.tcp));
        }
        out.extend(self.left_out.iter().map(LeftOut::text));
        let few = |row: &&Row| row.met == Some(false) && row.has_few_pairs;
        let few = self.cases.iter().filter(few).count();
        if few > 0 {
            out.push(format!(
                "A goal needs at least {} pairs: {few} cases had fewer and meet none.",
                self.fewest_pairs
            ));
        }
        let mut groups: Vec<&str> = Vec::new();
        for row in &self.cases {
            if !groups.contains(&row.group) {
                groups.push(row.group);
            }
        }
        for group in groups {
            let rows = self.cases.iter().filter(|row| row.group == group);
            out.push(format!("\n{group}\n{}", group_table(rows)));
        }
        out.push(format!(
            "\n{} of {} goals met ({:.0} s)",
            self.goals_met, self.goals, self.seconds
        ));
        out.join("\n")
    }
}

/// The rows of one group. Empty columns are left out.
fn group_table<'a>(rows: impl Iterator<Item = &'a Row>) -> String {
    type Column = (&'static str, fn(&Row) -> Option<String>);
    let columns: [Column; 9] = [
        ("case", |row| Some(row.case.clone())),
        ("result", |row| {
            Some(format!("{} {}", figure(row.result?.median), row.unit))
        }),
        ("limit", |row| Some(figure(row.limit_result?.median))),
        ("by", |row| Some(row.limit.clone())),
        ("ratio", |row| Some(format!("{:.2}", row.ratio?.median))),
        ("q1 .. q3", |row| {
            let ratio = row.ratio?;
            Some(format!("{:.2} .. {:.2}", ratio.q1, ratio.q3))
        }),
        ("goal", |row| Some(row.goal.clone())),
        ("met", |row| {
            Some(if row.met? { "yes" } else { "no" }.to_owned())
        }),
        ("CPU s/GB client+node+master", |row| row.cpu.map(cpu_text)),
    ];
    let rows: Vec<&Row> = rows.collect();
    let mut table = output::facts();
    let (mut header, mut cells) = (Vec::new(), vec![Vec::new(); rows.len()]);
    for (name, show) in columns {
        let column: Vec<String> = rows
            .iter()
            .map(|row| show(row).unwrap_or_default())
            .collect();
        if column.iter().any(|cell| !cell.is_empty()) {
            header.push(name);
            for (cells, cell) in cells.iter_mut().zip(column) {
                cells.push(cell);
            }
        }
    }
    table.set_header(header);
    for cells in cells {
        table.add_row(cells);
    }
    output::align_right(&mut table, 1..3);
    table.to_string()
}

fn cpu_text(cpu: Cpu) -> String {
    let of = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
    format!("{:.2} + {} + {}", cpu.client, of(cpu.node), of(cpu.master))
}

/// A number with about three significant digits.
fn figure(value: f64) -> String {
    if value >= 10_000.0 {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a float beyond the range becomes its end, which is no less readable"
        )]
        let whole = value.round() as u64;
        output::count(whole)
    } else if value >= 100.0 {
        format!("{value:.0}")
    } else if value >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::table;

    /// Some pairs with this result and this ratio.
    fn pairs(count: usize, result: f64, ratio: f64) -> Pairs {
        let mut pairs = Pairs::default();
        for _ in 0..count {
            // A limit of zero has no ratio.
            let limit = if ratio > 0.0 { result / ratio } else { 0.0 };
            pairs.add(result, Some(limit));
        }
        pairs
    }

    #[test]
    fn goals_are_met_by_the_median_on_the_right_side() {
        let met = |goal: Goal, result, ratio| {
            goal.is_met(Metric::Rate, &pairs(FEWEST_PAIRS, result, ratio))
        };
        assert_eq!(met(Goal::RatioAtLeast(0.5), 1.0, 0.5), Some(true));
        assert_eq!(met(Goal::RatioAtLeast(0.9), 9.0, 0.89), Some(false));
        assert_eq!(met(Goal::RatioAtMost(1.5), 9.0, 1.5), Some(true));
        assert_eq!(met(Goal::RatioAtMost(1.5), 1.0, 1.51), Some(false));
        assert_eq!(met(Goal::AtLeast(6.0), 6.0, 0.0), Some(true));
        assert_eq!(met(Goal::AtLeast(6.0), 5.9, 9.0), Some(false));
        assert_eq!(met(Goal::AtMost(5.0), 5.0, 9.0), Some(true));
        assert_eq!(met(Goal::AtMost(5.0), 5.1, 0.0), Some(false));
        assert_eq!(met(Goal::None("why"), 1.0, 1.0), None);
        assert_eq!(
            met(Goal::RatioAtMost(1.5), 1.0, 0.0),
            Some(false),
            "no ratio"
        );
    }

    #[test]
    fn too_few_pairs_meet_no_goal_and_no_pair_is_an_error() {
        let goal = Goal::RatioAtLeast(0.9);
        let few = pairs(FEWEST_PAIRS - 1, 2.0, 2.0);
        assert_eq!(goal.is_met(Metric::Rate, &few), Some(false));
        let enough = pairs(FEWEST_PAIRS, 2.0, 2.0);
        assert_eq!(goal.is_met(Metric::Rate, &enough), Some(true));
        // Pairs whose limit is zero have no ratio.
        let mut mixed = pairs(FEWEST_PAIRS - 1, 2.0, 2.0);
        mixed.add(2.0, Some(0.0));
        assert_eq!(goal.is_met(Metric::Rate, &mixed), Some(false));
        let memory = pairs(1, 2.0, 0.0);
        let goal = Goal::AtMost(2.0);
        assert_eq!(goal.is_met(Metric::Bytes, &memory), Some(true));
        let case = table().remove(0);
        assert!(Row::new(&case, "", &few, None).unwrap().has_few_pairs);
        assert!(!Row::new(&case, "", &enough, None).unwrap().has_few_pairs);
        assert!(Row::new(&case, "", &Pairs::default(), None).is_err());
    }

    #[test]
    fn processor_time_is_reported_for_each_process() {
        let window = |units, cpu_ns: &[u64]| Measured {
            calls: 1,
            spent_ns: 1,
            p50_ns: 1,
            p99_ns: 1,
            units,
            begin_ns: 0,
            end_ns: 1,
            cpu_ns: cpu_ns.to_vec(),
        };
        let cpu = Cpu::of(&[window(100, &[10, 20, 30]), window(100, &[50])], true, 1);
        assert_eq!(
            (cpu.client, cpu.master, cpu.node),
            (0.3, Some(0.1), Some(0.15))
        );
        let foreign = Cpu::of(&[window(100, &[10])], false, 0);
        assert_eq!(
            (foreign.client, foreign.master, foreign.node),
            (0.1, None, None)
        );
        assert_eq!(Cpu::median(&[cpu, cpu, foreign]).unwrap().master, Some(0.1));
        assert_eq!(Cpu::median(&[]), None);
    }

    #[test]
    fn figures_have_three_significant_digits() {
        let shown = [0.123, 9.87, 12.34, 734.2, 27_000.4].map(figure);
        assert_eq!(shown, ["0.12", "9.87", "12.3", "734", "27,000"]);
    }
}
