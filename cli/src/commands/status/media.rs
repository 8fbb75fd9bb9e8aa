//! The media of a pool.

use crate::output;
use crate::stats::percent;
use kvpool_client::MediumStats;
use kvpool_types::MediumId;
use serde::Serialize;

/// One medium.
#[derive(Debug, Serialize)]
pub(super) struct Medium {
    /// Empty for a refused medium without a known id.
    id: String,
    segment: u32,
    node: String,
    state: String,
    generation: u64,
    capacity_bytes: u64,
    used_bytes: u64,
    copies: u64,
    /// The zone that is written, counted from 0.
    zone: u32,
    zones: u64,
    /// Of a refused medium: its path at the node, and why the node does not use it.
    path: String,
    reason: String,
}

impl From<MediumStats> for Medium {
    fn from(medium: MediumStats) -> Self {
        Self {
            id: match medium.id {
                MediumId(0) => String::new(),
                id => id.to_string(),
            },
            segment: medium.segment.0,
            node: medium.node,
            state: medium.state,
            generation: medium.generation,
            capacity_bytes: medium.capacity.0,
            used_bytes: medium.used.0,
            copies: medium.copies,
            zone: medium.zone,
            zones: medium
                .capacity
                .0
                .checked_div(medium.zone_size.0)
                .unwrap_or(0),
            path: medium.path,
            reason: medium.reason,
        }
    }
}

fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        count => format!("{} times", output::count(count)),
    }
}

/// The table for people.
pub(super) fn table(media: &[Medium]) -> String {
    let mut table = output::table([
        "medium", "node", "state", "used", "copies", "zone", "attached",
    ]);
    for medium in media {
        let name = if medium.id.is_empty() {
            &medium.path
        } else {
            &medium.id
        };
        // The pool has no such medium.
        if medium.capacity_bytes == 0 {
            table.add_row([name, &medium.node, &medium.state]);
            continue;
        }
        table.add_row([
            name.clone(),
            medium.node.clone(),
            medium.state.clone(),
            format!(
                "{} of {} ({:.0} %)",
                output::bytes(medium.used_bytes),
                output::bytes(medium.capacity_bytes),
                percent(medium.used_bytes, medium.capacity_bytes)
            ),
            output::count(medium.copies),
            format!("{} of {}", u64::from(medium.zone) + 1, medium.zones),
            times(medium.generation),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_medium_of_a_first_start_was_attached_once() {
        assert_eq!(
            [times(1), times(2), times(1234)],
            ["once", "2 times", "1,234 times"]
        );
    }
}
