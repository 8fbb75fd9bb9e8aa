//! The text of `kvctl top`.

use super::facts::{Facts, Node, Point};
use crate::output::{self, one_line};
use crate::stats::percent;
use kvpool_types::Causes;

/// The points of a chart: one a column, the last minute.
const COLUMNS: usize = 60;
/// The most characters of a name: a longer one would push the other columns off the screen.
const NAME: usize = 40;
/// The steps of a bar: in the first lines, and in the table of nodes. That table has many columns, and its bar is
/// as wide as its header.
const BAR: u8 = 20;
const NODE_BAR: u8 = 6;
/// The most alerts and namespaces on a screen.
const SOME: usize = 5;

/// The whole text in about `height` lines: of the nodes as many as fit.
pub(super) fn text(facts: &Facts, height: usize) -> String {
    let is_whole = height == usize::MAX;
    let mut lines = vec![heading(facts)];
    lines.extend(pool(facts));
    lines.push(String::new());
    let some = if is_whole { usize::MAX } else { SOME };
    lines.extend(alerts(facts, some));
    if facts.pool.is_some() {
        lines.push(String::new());
        lines.extend(charts(&facts.history));
    }
    let mut tail = masters(facts);
    if facts.pool.is_some() {
        tail = format!("{}\n{tail}", namespaces(facts, some));
        let taken = lines.len() + tail.lines().count();
        // The table has a header and three lines of its own.
        let room = height.saturating_sub(taken + 5).max(1);
        lines.push(nodes(facts, room));
    }
    lines.push(tail);
    lines.join("\n")
}

/// The text while no master answers.
pub(super) fn without_answer(error: &anyhow::Error) -> String {
    format!("no answer, asking again: {}", Causes(error.as_ref()))
}

fn heading(facts: &Facts) -> String {
    let leader = match facts.leader.as_str() {
        "" if facts.role == "leader" => facts.told_by.as_str(),
        "" => "none",
        leader => leader,
    };
    let standbys = facts.masters.iter().filter(|one| one.role == "standby");
    let lag = standbys.clone().map(|one| one.lag).max();
    let lag = lag.map_or_else(String::new, |lag| {
        format!(", log lag {}", output::count(lag))
    });
    one_line(&format!(
        "pool {}  leader {leader}  epoch {}  standbys {}{lag}  store {}  log {}",
        facts.cluster_id,
        facts.epoch,
        standbys.count(),
        facts.store,
        output::count(facts.log_last),
    ))
}

fn pool(facts: &Facts) -> Vec<String> {
    let Some(pool) = &facts.pool else {
        let told = format!("{} does not lead: {}", facts.told_by, facts.reason);
        return vec![one_line(&told)];
    };
    let capacity: u64 = facts.nodes.iter().map(|node| node.capacity_bytes).sum();
    // Without a node that takes blocks the pool counts nothing, and the nodes still serve their blocks.
    let (used, capacity, remark) = match pool.capacity_bytes {
        0 if capacity > 0 => {
            let used = facts.nodes.iter().map(|node| node.used_bytes).sum();
            (used, capacity, "no node takes blocks, ")
        }
        taking => (pool.used_bytes, taking, ""),
    };
    vec![
        format!(
            "memory {}  {}, {remark}{} in quarantine",
            bar(used, capacity, BAR),
            share(used, capacity),
            output::bytes(pool.quarantine_bytes)
        ),
        format!(
            "blocks {}  puts in progress {}  puts waiting for room {}",
            output::count(pool.blocks),
            output::count(pool.reservations),
            output::count(pool.puts_waiting)
        ),
    ]
}

fn alerts(facts: &Facts, some: usize) -> Vec<String> {
    if facts.alerts.is_empty() {
        return vec!["no alert".to_owned()];
    }
    let shown = facts.alerts.iter().take(some);
    let mut lines: Vec<String> = shown
        .map(|alert| one_line(&format!("{}: {}", alert.severity, alert.message)))
        .collect();
    let left = facts.alerts.len().saturating_sub(some) as u64 + facts.alerts_left_off;
    if left > 0 {
        lines.push(format!("and {} more alerts", output::count(left)));
    }
    lines
}

fn charts(history: &[Point]) -> Vec<String> {
    let last = history.last().copied().unwrap_or_default();
    let asked = |point: &Point| point.lookups + point.prefix_asked;
    let found = |point: &Point| point.found + point.prefix_matched;
    let hits = |point: &Point| match asked(point) {
        asked if asked > 0.0 => 100.0 * found(point) / asked,
        _ => 0.0,
    };
    let hit = match asked(&last) {
        asked if asked > 0.0 => format!("{:.1} %", hits(&last)),
        _ => "-".to_owned(),
    };
    let of: [(&str, Reading<'_>); 6] = [
        ("puts/s", &|point| point.puts),
        ("gets/s", &found),
        ("evictions/s", &|point| point.evictions),
        ("demotions/s", &|point| point.demotions),
        ("loads/s", &|point| point.loads),
        ("put waits/s", &|point| point.put_waits),
    ];
    let mut lines = vec![format!(
        "{:<12}{:>12}  {}",
        "hit rate",
        hit,
        chart(history, &hits, 100.0)
    )];
    for (name, of) in of {
        let value = format!("{:.1}", of(&last));
        lines.push(format!(
            "{name:<12}{value:>12}  {}",
            chart(history, of, 0.0)
        ));
    }
    lines
}

/// A value of a point.
type Reading<'a> = &'a dyn Fn(&Point) -> f64;

/// One character for each of the last points, as high as its share of `top`; of the highest if `top` is 0.
fn chart(history: &[Point], of: Reading<'_>, top: f64) -> String {
    const STEPS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let shown = &history[history.len().saturating_sub(COLUMNS)..];
    let top = shown.iter().map(of).fold(top, f64::max);
    let step = |value: f64| {
        if top <= 0.0 || value <= 0.0 {
            return STEPS[0];
        }
        let of_eight = (value / top * 8.0).ceil().clamp(1.0, 8.0);
        let mut steps = (1..=8u8).zip(&STEPS[1..]);
        let step = steps.rfind(|(n, _)| f64::from(*n) <= of_eight);
        step.map_or(STEPS[0], |(_, step)| *step)
    };
    let blank = std::iter::repeat_n(' ', COLUMNS - shown.len());
    blank
        .chain(shown.iter().map(|point| step(of(point))))
        .collect()
}

fn nodes(facts: &Facts, room: usize) -> String {
    let mut table = output::table([
        "node", "state", "memory", "used", "media", "heard", "address", "version",
    ]);
    // A node that needs a look comes first.
    let mut nodes: Vec<&Node> = facts.nodes.iter().collect();
    nodes.sort_by_key(|node| node.state == "live");
    for node in nodes.iter().take(room) {
        let heard = node.silent_ms.map_or_else(String::new, |ms| {
            format!(
                "{:.1} s ago",
                std::time::Duration::from_millis(ms).as_secs_f64()
            )
        });
        let media = node.media.iter().map(|medium| {
            format!(
                "{} {}",
                medium.state,
                share(medium.used_bytes, medium.capacity_bytes)
            )
        });
        table.add_row([
            short(&node.name),
            node.state.clone(),
            bar(node.used_bytes, node.capacity_bytes, NODE_BAR),
            share(node.used_bytes, node.capacity_bytes),
            media.collect::<Vec<_>>().join(", "),
            heard,
            short(&node.data_address),
            short(output::version(&node.version)),
        ]);
    }
    match nodes.len().saturating_sub(room) {
        0 => table.to_string(),
        more => format!("{table}\nand {} more nodes", output::count(more as u64)),
    }
}

fn namespaces(facts: &Facts, some: usize) -> String {
    let mut table = output::table(["namespace", "blocks", "memory", "copies on media", "media"]);
    for space in facts.namespaces.iter().take(some) {
        table.add_row([
            short(&space.name),
            output::count(space.blocks),
            output::bytes(space.bytes),
            output::count(space.copies),
            output::bytes(space.copy_bytes),
        ]);
    }
    output::align_right(&mut table, 1..5);
    match facts.namespaces.len().saturating_sub(some) {
        0 => table.to_string(),
        more => format!(
            "{table}\nand {} more namespaces",
            output::count(more as u64)
        ),
    }
}

fn masters(facts: &Facts) -> String {
    let mut table = output::table(["master", "role", "log lag", "version"]);
    for master in &facts.masters {
        let address = match master.address.as_str() {
            "" => &facts.told_by,
            address => address,
        };
        table.add_row([
            short(address),
            master.role.clone(),
            output::count(master.lag),
            short(output::version(&master.version)),
        ]);
    }
    table.to_string()
}

fn share(used: u64, capacity: u64) -> String {
    format!(
        "{:.0} % of {}",
        percent(used, capacity),
        output::bytes(capacity)
    )
}

fn bar(used: u64, capacity: u64, steps: u8) -> String {
    let full = percent(used, capacity);
    (1..=steps)
        .map(|n| {
            if f64::from(n) * 100.0 / f64::from(steps) <= full {
                '█'
            } else {
                '░'
            }
        })
        .collect()
}

/// The start of a long name.
fn short(name: &str) -> String {
    match name.char_indices().nth(NAME) {
        Some((at, _)) => format!("{}…", &name[..at]),
        None => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Facts {
        let json = serde_json::json!({
            "role": "leader", "told_by": "http://a:1", "epoch": 3, "new_field": {},
            "pool": { "blocks": 7, "capacity_bytes": 1000, "used_bytes": 500 },
            "nodes": (0..100).map(|n| serde_json::json!({
                "name": format!("n{n:03}\u{1b}[2J"),
                "state": if n == 99 { "suspect" } else { "live" },
            })).collect::<Vec<_>>(),
            "namespaces": [{ "name": "x".repeat(1024), "blocks": 7 }],
            "alerts": [{ "severity": "warning", "message": "Node\nforged" }],
            "history": [{ "puts": 1.0 }, { "puts": 8.0, "lookups": 4.0, "found": 3.0 }],
        });
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn a_screen_shows_what_fits_and_a_text_shows_everything() {
        let screen = text(&facts(), 40);
        assert!(screen.lines().count() <= 40, "{screen}");
        assert!(
            screen.contains("more nodes") && screen.contains("suspect"),
            "{screen}"
        );
        let whole = text(&facts(), usize::MAX);
        assert!(whole.contains("n098") && !whole.contains("more nodes"));
    }

    #[test]
    fn the_memory_of_nodes_that_drain_is_shown_while_no_node_takes_blocks() {
        let json = serde_json::json!({
            "role": "leader", "pool": { "blocks": 7 },
            "nodes": [{ "name": "n", "state": "draining", "capacity_bytes": 1 << 30, "used_bytes": 1 << 29 }],
        });
        let text = text(&serde_json::from_value(json).unwrap(), 40);
        assert!(
            text.contains("50 % of 1.0 GiB, no node takes blocks"),
            "{text}"
        );
    }

    /// Nodes of two versions run side by side during an upgrade. Each has an SSD.
    #[test]
    fn nodes_and_masters_are_shown_with_their_versions_in_120_columns() {
        let node = |name: &str, version: &str| {
            serde_json::json!({
                "name": name, "state": "live", "data_address": "10.0.0.12:7072",
                "version": version, "silent_ms": 2900,
                "capacity_bytes": 512u64 << 30, "used_bytes": 512u64 << 30,
                "media": [{ "state": "ready", "capacity_bytes": 3u64 << 40, "used_bytes": 3u64 << 40 }],
            })
        };
        let json = serde_json::json!({
            "role": "leader", "pool": {},
            "nodes": [node("kvpool-node-0", "0.1.0"), node("kvpool-node-1", "")],
            "masters": [{ "address": "http://m:1", "role": "leader", "version": "0.2.0" }],
        });
        let text = text(&serde_json::from_value(json).unwrap(), 60);
        let rows = [
            ("kvpool-node-0", " 0.1.0"),
            ("kvpool-node-1", " unknown"),
            ("http://m:1", " 0.2.0"),
        ];
        for (name, version) in rows {
            let mut lines = text.lines().map(|line| line.trim_matches(['│', ' ']));
            let row = lines.find(|line| line.starts_with(name)).unwrap();
            assert!(row.ends_with(version), "{text}");
        }
        let widest = text.lines().map(|line| line.chars().count()).max();
        assert!(widest <= Some(120), "{widest:?} columns: {text}");
    }

    #[test]
    fn names_are_escaped_and_cut() {
        let whole = text(&facts(), usize::MAX);
        let harmful = |c: &char| c.is_control() && *c != '\n';
        assert_eq!(whole.chars().find(harmful), None);
        assert!(whole.contains(r"warning: Node\nforged"), "{whole}");
        assert!(whole.lines().all(|line| line.chars().count() < 200));
    }

    #[test]
    fn a_chart_is_as_wide_as_its_points_and_as_high_as_the_highest() {
        let all = facts();
        let puts = chart(&all.history, &|point| point.puts, 0.0);
        assert_eq!((puts.chars().count(), puts.trim()), (COLUMNS, "▁█"));
        assert!(text(&all, 40).contains("75.0 %"), "the hit rate");
    }

    #[test]
    fn a_standby_says_that_it_does_not_lead() {
        let json =
            serde_json::json!({ "role": "standby", "told_by": "http://b:1", "reason": "why" });
        let standby: Facts = serde_json::from_value(json).unwrap();
        let text = text(&standby, 40);
        assert!(text.contains("http://b:1 does not lead: why"), "{text}");
        assert!(text.contains("leader none"));
    }
}
