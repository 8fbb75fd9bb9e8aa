//! The problems of the daemons' files of tokens, keys and certificates, for `status` and `doctor`.

use kvpool_client::PoolStats;

/// One sentence for each problem, with the daemon that has it.
pub(crate) fn problems(stats: &PoolStats) -> Vec<String> {
    let of_leader = stats.problems.iter();
    let of_leader = of_leader.map(|said| format!("the leader says: {said}"));
    let of_nodes = stats.nodes.iter().flat_map(|node| {
        let said = node.problems.iter();
        said.map(move |said| format!("node {} says: {said}", node.name))
    });
    of_leader.chain(of_nodes).collect()
}
