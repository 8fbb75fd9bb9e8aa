//! Guaranteed shares that exceed the pool, for `namespace`, `put`, `status` and `doctor`.

use crate::output;
use kvpool_client::PoolStats;

/// The problem and the remedy; `None` if the pool has room for all guaranteed shares.
pub(crate) fn problem(stats: &PoolStats) -> Option<String> {
    let counter = |name| stats.counters.get(name).copied().unwrap_or_default();
    let excess = counter("guaranteed_excess_bytes");
    (excess > 0).then(|| {
        format!(
            "the guaranteed shares of namespaces are {}, which is {} more than the pool holds below its high \
             watermark: puts may fail as full. Lower shares (`kvctl namespaces` lists them), or start a store node",
            output::bytes(counter("guaranteed_bytes")),
            output::bytes(excess)
        )
    })
}
