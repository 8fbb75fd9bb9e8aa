//! Whether a pool gives back every byte that it has granted.

use anyhow::ensure;
use kvpool_client::{Client, Remove};
use std::time::{Duration, Instant};

/// The time for leases, fences and transfers to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// Removes every block. Fails if a byte of memory or of a medium stays in use: an extent was leaked.
pub async fn empty_the_pool(client: &Client) -> anyhow::Result<()> {
    client.remove(Remove::Everything, true).await?;
    let limit = Instant::now() + PATIENCE;
    loop {
        let stats = client.stats().await?;
        let media: u64 = stats.media.iter().map(|medium| medium.used.0).sum();
        let copies: u64 = stats.media.iter().map(|medium| medium.copies).sum();
        let left = stats.used.0 + stats.quarantine.0 + media + copies + stats.blocks;
        if left + stats.reservations == 0 {
            return Ok(());
        }
        ensure!(
            Instant::now() < limit,
            "not empty after {PATIENCE:?}: {stats:?}"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
