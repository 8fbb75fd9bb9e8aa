//! The problems of a pool.

use crate::silence::next_step;
use crate::stats::percent;
use crate::{masters, media, output, shares, tokens};
use kvpool_client::{NodeStats, PoolStats};

/// Above this share of the pool, quarantine is stuck: readers hold it, or nodes are silent.
const MUCH_QUARANTINE: f64 = 10.0;

/// The problems of the pool, one sentence each.
pub(super) fn of(stats: &PoolStats) -> Vec<String> {
    let mut problems = Vec::new();
    for node in stats.nodes.iter().filter(|node| node.state != "live") {
        let has_ssd = media::has_ssd(&stats.media, &node.name);
        problems.push(unfit(node, node.media_leave && has_ssd));
    }
    problems.extend(media::problems(&stats.media));
    problems.extend(shares::problem(stats));
    problems.extend(tokens::problems(stats));
    let quarantine = percent(stats.quarantine.0, stats.capacity.0);
    if quarantine > MUCH_QUARANTINE {
        problems.push(format!(
            "{quarantine:.0} % of the pool is in quarantine: readers hold it, or a node does not \
             answer"
        ));
    }
    problems
}

/// The alarms of the metadata store: as a master tells them, or as the leader counts them.
pub(super) fn of_store(stats: &PoolStats, alarms: &[String]) -> Vec<String> {
    if !alarms.is_empty() {
        return alarms.iter().map(|alarm| masters::alarm(alarm)).collect();
    }
    let count = stats.counters.get("store_alarms").copied();
    let told = match count.unwrap_or_default() {
        0 => return Vec::new(),
        1 => "an alarm: `kvctl cluster` names it".to_owned(),
        count => format!(
            "{} alarms: `kvctl cluster` names them",
            output::count(count)
        ),
    };
    vec![format!("the metadata store raises {told}")]
}

/// The problem of a node that is not live. `with_ssds`: it drains with its SSDs.
fn unfit(node: &NodeStats, with_ssds: bool) -> String {
    let (name, state) = (&node.name, node.state.as_str());
    if state == "drained" {
        return match with_ssds {
            true => format!(
                "node {name} is drained with its SSDs: a stop loses no block. Stop it, and run `kvctl ssd detach` for \
                 each of its SSDs"
            ),
            // A master of an earlier version does not tell whether the SSDs leave.
            false => format!(
                "node {name} is drained: a stop loses no block. Keep its disks if it has an SSD and was \
                 drained without --ssd"
            ),
        };
    }
    let (with, them) = match with_ssds {
        true => (", and its SSDs leave too", "it and its SSDs"),
        false => ("", "it"),
    };
    let lost = match node.left_blocks {
        Some(left) if left > 0 => {
            let left = output::count(left);
            format!(", and {left} blocks would be lost with {them} now")
        }
        _ => String::new(),
    };
    format!(
        "node {name} is {state}{with}: last heartbeat {:.1} s ago{lost}{}",
        node.heartbeat_age.as_secs_f64(),
        next_step(state)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::status::tests::stats;
    use crate::media::tests::medium;
    use kvpool_types::{Incarnation, Length};
    use std::time::Duration;

    fn draining(left_blocks: Option<u64>) -> NodeStats {
        NodeStats {
            name: "n".to_owned(),
            state: "draining".to_owned(),
            incarnation: Incarnation(1),
            data_address: String::new(),
            shm_path: String::new(),
            heartbeat_age: Duration::ZERO,
            segments: Vec::new(),
            problems: Vec::new(),
            left_blocks,
            version: String::new(),
            media_leave: false,
        }
    }

    /// An operator sees how far a drain is, and what a stop would cost.
    #[test]
    fn a_draining_node_is_reported_with_the_blocks_that_a_stop_would_lose() {
        for (left, is_told) in [(None, false), (Some(0), false), (Some(12), true)] {
            let mut pool = stats(&[]);
            pool.nodes.push(draining(left));
            let text = of(&pool).remove(0);
            assert!(text.starts_with("node n is draining: last"), "{text}");
            let told = text.contains("12 blocks would be lost with it now");
            assert_eq!(told, is_told, "{text}");
        }
    }

    #[test]
    fn a_silent_node_is_reported_with_the_next_step() {
        let mut pool = stats(&[]);
        pool.nodes.push(draining(None));
        assert!(!of(&pool)[0].contains("its log"), "{:?}", of(&pool));
        pool.nodes[0].state = "suspect".to_owned();
        let text = of(&pool).remove(0);
        assert!(text.contains("Look at its host and its log"), "{text}");
    }

    /// An operator keeps the SSDs of a node, or retires them.
    #[test]
    fn a_node_says_whether_its_ssds_leave_too() {
        let mut pool = stats(&[]);
        let mut node = draining(Some(12));
        node.media_leave = true;
        pool.nodes.push(node);
        // No SSD of the node is known.
        assert!(!of(&pool)[0].contains("SSDs"), "{:?}", of(&pool));
        let mut ssd = medium("ready");
        ssd.node = "n".to_owned();
        pool.media.push(ssd);
        let text = of(&pool).remove(0);
        assert!(text.contains("its SSDs leave too"), "{text}");
        assert!(
            text.contains("12 blocks would be lost with it and its SSDs"),
            "{text}"
        );
        pool.nodes[0].state = "drained".to_owned();
        let text = of(&pool).remove(0);
        assert!(text.contains("kvctl ssd detach"), "{text}");
        pool.nodes[0].media_leave = false;
        let text = of(&pool).remove(0);
        assert!(text.contains("Keep its disks"), "{text}");
    }

    /// The counters of the leader never fall.
    #[test]
    fn faults_of_the_past_are_no_present_problems() {
        let healed = stats(&[
            ("replicas_corrupt_total", 2),
            ("checksum_reports_total", 2),
            ("unreachable_reports_total", 92),
            ("blocks_lost_total", 2),
        ]);
        assert_eq!(of(&healed), Vec::<String>::new());
    }

    #[test]
    fn an_alarm_of_the_metadata_store_is_named_or_at_least_counted() {
        let one = stats(&[("store_alarms", 1)]);
        let named = of_store(&one, &["/data is full".to_owned()]);
        assert_eq!(named, [masters::alarm("/data is full")]);
        let counted = |pool: &PoolStats| of_store(pool, &[]).concat();
        assert!(counted(&one).contains("raises an alarm: "));
        let two = stats(&[("store_alarms", 2)]);
        assert!(counted(&two).contains("raises 2 alarms: "));
        assert_eq!(counted(&stats(&[])), "");
    }

    #[test]
    fn a_healthy_pool_has_no_problems_and_each_problem_is_told() {
        assert_eq!(of(&stats(&[])), Vec::<String>::new());
        let shares = stats(&[
            ("guaranteed_bytes", 3 << 30),
            ("guaranteed_excess_bytes", 1 << 30),
        ]);
        let expected = "the guaranteed shares of namespaces are 3.0 GiB, which is 1.0 GiB more";
        assert!(of(&shares)[0].starts_with(expected), "{:?}", of(&shares));
        let mut ill = stats(&[]);
        ill.problems = vec!["the JWKS cannot be used".to_owned()];
        assert_eq!(of(&ill), ["the leader says: the JWKS cannot be used"]);
        let mut held = stats(&[]);
        (held.quarantine, held.capacity) = (Length(20), Length(100));
        assert!(of(&held)[0].starts_with("20 % of the pool"));
    }
}
