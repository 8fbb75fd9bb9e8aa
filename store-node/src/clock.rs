//! The clock of the node, and how far the master's is ahead of it.
//!
//! Both are `CLOCK_BOOTTIME` in milliseconds, which no process can set. Each machine's clock begins
//! at its own boot, so the master sends its time in each welcome and each answer to a heartbeat.
//! The message takes a while, so the node's estimate of the master's clock is late and never early.

/// The time of this machine in milliseconds since its boot.
pub(crate) fn boot_ms() -> u64 {
    u64::try_from(kvpool_seams::boot_time().as_millis()).unwrap_or(u64::MAX)
}

/// By how many milliseconds the clock of a master that now sends `clock_ms` is ahead. `None` for 0,
/// which a master of an earlier version sends.
pub(crate) fn ahead_ms(clock_ms: u64) -> Option<i64> {
    let theirs = i64::try_from(clock_ms).ok().filter(|theirs| *theirs > 0)?;
    Some(theirs.saturating_sub_unsigned(boot_ms()))
}
