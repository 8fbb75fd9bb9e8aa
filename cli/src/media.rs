//! The problems of a pool's media, for `status` and `doctor`.

use crate::output;
use kvpool_client::MediumStats;

/// One or two sentences for each medium that is not in full use: the problem and the remedy.
pub(crate) fn problems(media: &[MediumStats]) -> Vec<String> {
    media.iter().filter_map(problem).collect()
}

/// Whether the pool has a medium of this node. A medium of another pool does not count.
pub(crate) fn has_ssd(media: &[MediumStats], node: &str) -> bool {
    let mut media = media.iter();
    media.any(|medium| medium.node == node && medium.capacity.0 > 0)
}

fn problem(medium: &MediumStats) -> Option<String> {
    let MediumStats {
        id, node, state, ..
    } = medium;
    let copies = output::count(medium.copies);
    let rest = match state.as_str() {
        "ready" => return None,
        "refused" => return Some(unused(medium)),
        "read_only" => {
            "takes no writes: its blocks are read, and none is added. Check the free room and the \
             kernel log of its host"
                .to_owned()
        }
        "slow" => format!(
            "is too slow: its {copies} copies are misses until it is fast again. Check the disk and what else uses it"
        ),
        "gone" => format!(
            "has failed: its {copies} copies are misses. Replace the disk and restart the node with \
             the new one, then run `kvctl ssd detach {id}`"
        ),
        "attaching" => {
            "is not attached yet: its copies are misses. If this stays, read the node's \
                        log"
            .to_owned()
        }
        // A state of a later release is reported as it is.
        "absent" => format!(
            "is absent: its {copies} copies are misses. Start node {node} again with this disk. Only if the disk will \
             never come back: `kvctl ssd detach {id} --yes` forgets the copies"
        ),
        other => format!("is {other}"),
    };
    Some(format!("medium {id} of node {node} {rest}"))
}

/// The problem of a medium that its node does not use. The reason of the node has the remedy.
fn unused(medium: &MediumStats) -> String {
    let MediumStats {
        node, path, reason, ..
    } = medium;
    let lost = match medium.copies {
        0 => String::new(),
        copies => format!(". Its {} copies are misses", output::count(copies)),
    };
    format!("node {node} does not use {path}: {reason}{lost}")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use kvpool_types::{Length, MediumId, SegmentId};

    pub(crate) fn medium(state: &str) -> MediumStats {
        MediumStats {
            id: MediumId(0xd15c),
            segment: SegmentId(1),
            node: "node-1".to_owned(),
            state: state.to_owned(),
            generation: 1,
            capacity: Length(1 << 30),
            used: Length(1 << 20),
            copies: 1000,
            zone: 0,
            zone_size: Length(1 << 25),
            path: String::new(),
            reason: String::new(),
        }
    }

    #[test]
    fn only_a_medium_in_full_use_is_no_problem() {
        let states = [
            "ready",
            "read_only",
            "slow",
            "gone",
            "attaching",
            "absent",
            "new",
        ];
        let found = problems(&states.map(medium));
        assert_eq!(found.len(), states.len() - 1);
        assert!(
            found
                .iter()
                .all(|one| one.contains("node-1") && one.contains("d15c"))
        );
        assert!(found[4].contains("1,000 copies") && found[4].contains("kvctl ssd detach"));
    }

    /// A node that has crashed is back in seconds, and a medium that is detached has no copy left.
    #[test]
    fn an_absent_medium_is_detached_only_if_its_disk_never_comes_back() {
        let text = problem(&medium("absent")).unwrap();
        let start = text.find("Start node node-1 again with this disk").unwrap();
        let detach = text.find("Only if the disk will never come back").unwrap();
        assert!(start < detach, "{text}");
    }

    #[test]
    fn a_medium_that_its_node_does_not_use_is_named_by_its_path_with_the_reason() {
        let mut refused = medium("refused");
        refused.path = "/mnt/nvme/blocks".to_owned();
        refused.reason = "it belongs to pool a, this is pool b".to_owned();
        let text =
            "node node-1 does not use /mnt/nvme/blocks: it belongs to pool a, this is pool b";
        let with_copies = format!("{text}. Its 1,000 copies are misses");
        assert_eq!(problems(&[refused.clone()]), [with_copies]);
        refused.copies = 0;
        assert_eq!(problems(&[refused]), [text]);
    }
}
