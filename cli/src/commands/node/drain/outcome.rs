//! The outcome of a drain: its text, and whether the command succeeds.

use super::watch::{DRAINED, GONE};
use crate::output;
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct Outcome {
    pub(super) node: String,
    /// The node's state at the end; `gone` for a node that has left the pool.
    pub(super) state: String,
    pub(super) moved: u64,
    pub(super) bytes: u64,
    /// Blocks that are on the node only, and that a stop loses. With --ssd these are also the blocks on its SSDs.
    pub(super) left: u64,
    /// Blocks that did not move, and whose only copy is on the node's SSD. With --ssd they are among `left`.
    pub(super) on_ssd: u64,
    /// Whether the node's SSDs leave too.
    #[serde(skip)]
    pub(super) ssd_leaves: bool,
    /// Why the last of these was not moved.
    pub(super) reason: Option<String>,
    pub(super) seconds: f64,
    /// Whether the command has only begun the drain, which goes on.
    #[serde(skip)]
    pub(super) goes_on: bool,
}

impl Outcome {
    fn may_stop(&self) -> bool {
        matches!(self.state.as_str(), DRAINED | GONE)
    }

    /// Fails unless a stop of the node loses no block, or loses only blocks whose loss the operator accepts.
    pub(super) fn check(&self, is_full: bool, allow_loss: bool) -> anyhow::Result<()> {
        let node = &self.node;
        // The drain of a node that has left the pool is over.
        if self.goes_on && self.state != GONE {
            anyhow::ensure!(
                allow_loss || self.may_stop(),
                "the drain of node {node} goes on: stop the node when `kvctl status` shows it as drained. To succeed \
                 at once, repeat the command with --allow-loss"
            );
            return Ok(());
        }
        if self.left > 0 {
            let left = output::count(self.left);
            // Old blocks stay when the other nodes are full. Any other reason is a fault to mend first.
            let why = match (self.state.as_str(), is_full) {
                (GONE, _) => format!(
                    "node {node} has left the pool before {left} of its blocks had moved: they are lost, unless its \
                     SSD has copies. To accept this, pass --allow-loss"
                ),
                (_, is_full) => {
                    let remedy = match is_full {
                        true => "add a store node, or make room on the others,",
                        false => "mend the cause",
                    };
                    format!(
                        "{left} blocks would be lost with node {node}: {remedy} and run the command again. To accept \
                         their loss, repeat it with --allow-loss"
                    )
                }
            };
            anyhow::ensure!(allow_loss, why);
            return Ok(());
        }
        anyhow::ensure!(
            self.may_stop(),
            "node {node} is {}, and not drained yet: run the command again, or wait until `kvctl status` shows it as \
             drained",
            self.state
        );
        Ok(())
    }
}

pub(super) fn said(outcome: &Outcome) -> String {
    let node = &outcome.node;
    let (moved, left) = (output::count(outcome.moved), output::count(outcome.left));
    let begin = match outcome.goes_on {
        true => format!("node {node} takes no new blocks."),
        false => format!(
            "node {node} takes no new blocks: moved {moved} blocks in {:.1} s.",
            outcome.seconds
        ),
    };
    let on_ssd = match outcome.on_ssd {
        0 if outcome.ssd_leaves && outcome.state == DRAINED && outcome.left == 0 => {
            " No block is only on its SSD.".to_owned()
        }
        0 => String::new(),
        blocks if outcome.ssd_leaves => {
            format!(" {} of them are on its SSD.", output::count(blocks))
        }
        blocks => format!(
            " {} blocks have only a copy on its SSD, and are back when the node is.",
            output::count(blocks)
        ),
    };
    let reason = match &outcome.reason {
        Some(reason) => format!(" (last reason: {reason})"),
        None => String::new(),
    };
    match (outcome.left, outcome.state.as_str()) {
        (0, DRAINED) => {
            format!("{begin}{on_ssd} It can be stopped now: `kvctl status` shows it as drained.")
        }
        (0, GONE) => format!("{begin}{on_ssd} It has left the pool."),
        (_, GONE) => {
            format!("{begin}{on_ssd} It has left the pool before {left} blocks had moved{reason}.")
        }
        _ if outcome.goes_on => format!(
            "{begin} Its drain goes on: {left} blocks are on this node only. `kvctl status` shows the node as drained \
             once it can be stopped."
        ),
        (0, state) => format!("{begin}{on_ssd} It is {state}, and not drained yet."),
        (_, DRAINED) => format!(
            "{begin} {left} blocks are on this node only{reason}.{on_ssd} `kvctl status` shows the node as drained, \
             because the master does not know that its SSD leaves too."
        ),
        _ => format!(
            "{begin} {left} blocks are on this node only and leave the pool when it stops{reason}.{on_ssd} \
             `kvctl status` shows the node as drained once no such block is left."
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(state: &str, left: u64, on_ssd: u64) -> Outcome {
        Outcome {
            node: "n".into(),
            state: state.into(),
            moved: 3,
            bytes: 3,
            left,
            on_ssd,
            ssd_leaves: false,
            reason: None,
            seconds: 1.0,
            goes_on: false,
        }
    }

    /// An operator retires the machine with its disks when the command says so.
    #[test]
    fn a_drain_of_ssds_says_whether_blocks_are_only_there() {
        let of_ssds = |state, left| Outcome {
            ssd_leaves: true,
            ..outcome(state, left, left)
        };
        let left = of_ssds("draining", 4);
        let refused = left.check(true, false).unwrap_err().to_string();
        assert!(refused.contains("4 blocks would be lost"), "{refused}");
        assert!(left.check(true, true).is_ok());
        let text = said(&left);
        assert!(text.contains("4 of them are on its SSD"), "{text}");
        assert!(!text.contains("are back when the node is"), "{text}");
        assert!(!text.contains("can be stopped"), "{text}");
        let empty = of_ssds("drained", 0);
        assert!(empty.check(false, false).is_ok());
        let text = said(&empty);
        assert!(text.contains("No block is only on its SSD"), "{text}");
        assert!(text.contains("can be stopped now"), "{text}");
        // Nobody has counted the blocks on its SSD.
        for state in ["draining", "suspect"] {
            let text = said(&of_ssds(state, 0));
            assert!(!text.contains("No block is only on its SSD"), "{text}");
        }
        // The master counts on an SSD that does not come back.
        let trusted = of_ssds("drained", 4);
        assert!(trusted.check(false, false).is_err());
        let text = said(&trusted);
        assert!(!text.contains("can be stopped"), "{text}");
        assert!(text.contains("does not know that its SSD leaves"), "{text}");
    }

    /// A script stops the node when the command succeeds.
    #[test]
    fn a_drain_fails_while_a_stop_would_lose_blocks_unless_the_loss_is_accepted() {
        for is_full in [false, true] {
            let refused = outcome("draining", 2, 0).check(is_full, false);
            let why = refused.unwrap_err().to_string();
            assert!(why.contains("2 blocks would be lost"), "{why}");
            assert!(why.contains("--allow-loss"), "{why}");
            assert_eq!(why.contains("add a store node"), is_full, "{why}");
            assert!(outcome("draining", 2, 0).check(is_full, true).is_ok());
            assert!(outcome("drained", 0, 4).check(is_full, false).is_ok());
            // Nobody knows what a stop loses.
            assert!(outcome("suspect", 0, 0).check(is_full, true).is_err());
        }
    }

    /// An operator stops the node when the command says that it may be stopped.
    #[test]
    fn a_drain_says_that_the_node_can_be_stopped_only_when_it_is_drained() {
        for (state, left) in [("draining", 0), ("draining", 2), ("suspect", 0)] {
            let outcome = outcome(state, left, 0);
            let text = said(&outcome);
            assert!(!text.contains("can be stopped"), "{text}");
            assert!(!outcome.may_stop());
        }
        let drained = outcome("drained", 0, 4);
        let text = said(&drained);
        assert!(
            text.contains("can be stopped now") && drained.may_stop(),
            "{text}"
        );
        assert!(
            text.contains("4 blocks have only a copy on its SSD"),
            "{text}"
        );
        assert!(!text.contains("leave the pool"), "{text}");
        let both = said(&outcome("draining", 2, 4));
        assert!(both.contains("2 blocks are on this node only"), "{both}");
        assert!(
            both.contains("4 blocks have only a copy on its SSD"),
            "{both}"
        );
    }

    /// The master counts also blocks that no task has tried to move.
    #[test]
    fn a_drain_names_a_reason_only_where_there_is_one() {
        let text = said(&outcome("draining", 2, 0));
        assert!(!text.contains("last reason"), "{text}");
        let reason = Some("no other node takes replicas now".to_owned());
        let failed = Outcome {
            reason,
            ..outcome("draining", 2, 0)
        };
        let text = said(&failed);
        assert!(
            text.contains("(last reason: no other node takes replicas now)"),
            "{text}"
        );
    }

    /// With `--timeout 0s` a script only begins the drain. It must not stop the node yet.
    #[test]
    fn a_drain_that_is_only_begun_ends_well_when_the_node_is_drained_or_a_loss_is_accepted() {
        for (state, left) in [("draining", 2), ("draining", 0), ("drained", 0)] {
            let begun = Outcome {
                goes_on: true,
                ..outcome(state, left, 0)
            };
            let is_drained = state == "drained";
            assert_eq!(begun.check(false, false).is_ok(), is_drained);
            assert!(begun.check(false, true).is_ok());
            let text = said(&begun);
            assert_eq!(text.contains("goes on"), !is_drained, "{text}");
            assert_eq!(text.contains("can be stopped now"), is_drained, "{text}");
            assert!(!text.contains("moved"), "{text}");
        }
    }

    #[test]
    fn a_drain_of_a_node_that_left_too_early_fails() {
        let early = outcome("gone", 2, 0);
        let why = early.check(false, false).unwrap_err().to_string();
        assert!(why.contains("has left the pool before 2"), "{why}");
        assert!(early.check(false, true).is_ok());
        assert!(outcome("gone", 0, 0).check(false, false).is_ok());
        // With `--timeout 0s` too: the node may have left at once.
        let only_begun = |left| Outcome {
            goes_on: true,
            ..outcome("gone", left, 0)
        };
        let why = only_begun(2).check(false, false).unwrap_err().to_string();
        assert!(why.contains("has left the pool before 2"), "{why}");
        assert!(only_begun(2).check(false, true).is_ok());
        assert!(only_begun(0).check(false, false).is_ok());
    }
}
